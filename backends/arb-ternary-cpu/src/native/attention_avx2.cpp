// Attention with AVX2.
#include "simd_avx2.h"

// The loops are written in what comes first.
#include "attention_loops.h"

namespace arb {

const AttentionKernels& attention_avx2() {
  static constexpr AttentionKernels kernels = attention_of<FloatWords>();
  return kernels;
}

}  // namespace arb
