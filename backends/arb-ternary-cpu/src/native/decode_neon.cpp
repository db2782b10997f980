#include "simd_neon.h"

// The loops are written in what comes first.
#include "decode_loops.h"

namespace arb {

const DecodeKernels& decode_neon() { return kDecode; }

}  // namespace arb
