#include "simd_avx512vnni.h"

// The loops are written in what comes first.
#include "decode_loops.h"

namespace arb {

const DecodeKernels& decode_avx512vnni() { return kDecode; }

}  // namespace arb
