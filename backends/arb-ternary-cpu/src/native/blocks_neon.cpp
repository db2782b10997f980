// Blocks with NEON.
#include "simd_neon.h"

// The loops are written in what comes first.
#include "blocks_loops.h"

namespace arb {

const BlockKernels& block_kernels_neon() { return kBlocks; }

}  // namespace arb
