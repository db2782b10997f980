// Loops that write bfloat16, where an instruction rounds to it. What quantize_both() compares keeps its subnormal
// numbers.
#define ARB_HARDWARE_BFLOAT16
#include "simd_avx512vnni.h"

// The loops are written in what comes first.
#include "blocks_loops.h"

namespace arb {
namespace {

BlockKernels with_bfloat16() {
  BlockKernels kernels = block_kernels_avx512vnni();
  kernels.normalise_back = normalise_back;
  kernels.activate_back = activate_back;
  kernels.turn = turn;
  kernels.turn_back = turn_back;
  return kernels;
}

}  // namespace

const BlockKernels& block_kernels_avx512bf16() {
  static const BlockKernels kernels = with_bfloat16();
  return kernels;
}

}  // namespace arb
