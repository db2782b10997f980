// Blocks with AVX-512.
#include "simd_avx512vnni.h"

// The loops are written in what comes first.
#include "blocks_loops.h"

namespace arb {

const BlockKernels& block_kernels_avx512vnni() { return kBlocks; }

}  // namespace arb
