// Blocks in plain C++.
#include "simd_scalar.h"

// The loops are written in what comes first.
#include "blocks_loops.h"

namespace arb {

const BlockKernels& block_kernels_scalar() { return kBlocks; }

}  // namespace arb
