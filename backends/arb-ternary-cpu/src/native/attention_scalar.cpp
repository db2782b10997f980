// Attention in plain C++.
#include "simd_scalar.h"

// The loops are written in what comes first.
#include "attention_loops.h"

namespace arb {

const AttentionKernels& attention_scalar() {
  static constexpr AttentionKernels kernels = attention_of<FloatWords>();
  return kernels;
}

}  // namespace arb
