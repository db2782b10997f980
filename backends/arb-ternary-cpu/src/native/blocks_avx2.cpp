// Blocks with AVX2.
#include "simd_avx2.h"

// The loops are written in what comes first.
#include "blocks_loops.h"

namespace arb {

const BlockKernels& block_kernels_avx2() { return kBlocks; }

}  // namespace arb
