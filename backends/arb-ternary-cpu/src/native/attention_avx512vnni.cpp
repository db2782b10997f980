// Attention with AVX-512.
#include "simd_avx512vnni.h"

// The loops are written in what comes first.
#include "attention_loops.h"

namespace arb {

const AttentionKernels& attention_avx512vnni() {
  static constexpr AttentionKernels kernels = attention_of<FloatWords>();
  return kernels;
}

}  // namespace arb
