// Rows at a time: quantisation, the fused norm, stochastic rounding, lookup, and the packed layout itself.
#pragma once

#include <cstdint>

#include "hash.h"
#include "products.h"

namespace arb {

// int8 trits [rows][columns] to and from [ceil(rows / 16)][ceil(columns / 16)][64]. Padding has the code 1. `pack`
// returns whether all trits were -1, 0 or 1.
bool pack_trits(int threads, const int8_t* trits, int64_t rows, int64_t columns, uint8_t* packed);
void unpack_trits(int threads, const uint8_t* packed, int64_t rows, int64_t columns, int8_t* trits);

void quantize_rows(const ProductKernels& kernels, int threads, const void* x, Dtype dtype, int64_t rows,
                   int64_t columns, int8_t* q, float* scale);
void norm_quantize_rows(const ProductKernels& kernels, int threads, const void* x, Dtype dtype, int64_t rows,
                        int64_t columns, float eps, int8_t* q, float* scale);

// Stochastic rounding of `count` elements to int8; returns the scale, a power of two.
float quantize_gradient(const ProductKernels& kernels, int threads, const void* grad, Dtype dtype, int64_t count,
                        const HashWords& words, int8_t* q);

// Rows ids[0 .. m) of a weight with `rows` rows to out [m][columns]. Returns the place of the first id that is outside
// the weight, before anything is written, or -1.
int64_t lookup_rows(const ProductKernels& kernels, int threads, const int64_t* ids, int64_t m, const uint8_t* packed,
                    const int8_t* exponent, int64_t rows, int64_t columns, int64_t groups, int64_t group_size,
                    void* out, Dtype dtype);

}  // namespace arb
