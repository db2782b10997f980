#include "simd_scalar.h"

// The loops are written in what comes first.
#include "decode_loops.h"

namespace arb {

const DecodeKernels& decode_scalar() { return kDecode; }

}  // namespace arb
