#include "simd_avx2.h"

// The loops are written in what comes first.
#include "decode_loops.h"

namespace arb {

const DecodeKernels& decode_avx2() { return kDecode; }

}  // namespace arb
