// Matrix products with a packed weight, cut into tasks.
#pragma once

#include <cstdint>

#include "products.h"

namespace arb {

// A packed weight: [ceil(N / 16)][ceil(K / 16)][64 bytes] and its exponents, int8 [N][J].
struct Weight {
  const uint8_t* packed;
  const int8_t* exponent;
  int64_t rows;        // N, at least 1
  int64_t columns;     // K, at least 1
  int64_t groups;      // J
  int64_t group_size;  // G: a multiple of 16, or all of K
};

// Exponents of a row, or of a group in grad_y @ W, may differ by so much; the sums of more would not fit in 64 bits.
constexpr int kLargestSpread = 40;

// Each returns the largest difference of exponents that it met; where that is above kLargestSpread, `out` is undefined.
// out[m][n] = dtype(float(sum) * scale[m] * 2**floor[n] + bias[n]) with the exact sum over K of x * (T << (E - floor)).
int linear_int8(const ProductKernels& kernels, int threads, const Weight& weight, const int8_t* x, const float* scale,
                int64_t m, const float* bias, void* out, Dtype dtype);
// out[m][k] = dtype(float(sum) * scale * 2**floor[k]) with the exact sum over N of grad * (T << (E - floor)).
int grad_input_int8(const ProductKernels& kernels, int threads, const Weight& weight, const int8_t* grad, float scale,
                    int64_t m, void* out, Dtype dtype);

// The same with float operands, summed in float32 in the order of the columns (or rows) of the weight.
void linear_float(const ProductKernels& kernels, int threads, const Weight& weight, const void* x, Dtype x_dtype,
                  int64_t m, const float* bias, void* out, Dtype dtype);
void grad_input_float(const ProductKernels& kernels, int threads, const Weight& weight, const void* grad,
                      Dtype grad_dtype, int64_t m, void* out, Dtype dtype);

}  // namespace arb
