// Attention with NEON.
#include "simd_neon.h"

// The loops are written in what comes first.
#include "attention_loops.h"

namespace arb {

const AttentionKernels& attention_neon() {
  static constexpr AttentionKernels kernels = attention_of<FloatWords>();
  return kernels;
}

}  // namespace arb
