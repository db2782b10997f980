// What lies between the products of a transformer's block, forward and backward: norms, activations, heads that turn
// with their positions, quantisation.
//
// Rows are computed in float32, whatever their dtype, and one by one, so that a result depends neither on the number of
// threads nor on the rows around it. The loops are in blocks_loops.h, one table an instruction set; the drivers
// (blocks.cpp) share out the rows and are compiled without instruction-set flags.
#pragma once

#include <cstdint>

#include "activation.h"
#include "hash.h"
#include "isa.h"
#include "products.h"

namespace arb {

// Floats of a row that a loop may write beyond the last.
constexpr int64_t kRowSlack = 16;

// What rows are multiplied by after their norm, a number a feature, or null; backward adds their gradients to `sums`.
struct Gain {
  const float* values = nullptr;
  float* sums = nullptr;
};

// Angles of the planes of a head, one head after the other; without cos and sin, heads stay as they are.
struct Rotation {
  const float *cos = nullptr, *sin = nullptr;
  int64_t stride = 0;  // from the angles of a head to those of the next
};

struct BlockKernels {
  // out = x as floats; writes up to kRowSlack - 1 floats more.
  void (*widen)(const void* x, Dtype dtype, int64_t count, float* out);
  void (*narrow)(const float* x, int64_t count, Dtype dtype, void* out);
  // sum += x
  void (*add)(const void* x, Dtype dtype, int64_t count, float* sum);
  // A row of normalise_quantize() below; returns its scale.
  float (*normalise_quantize)(const void* x, Dtype dtype, int64_t count, float eps, const float* gain, int8_t* q,
                              float* r);
  // A row of normalise_back() below; x and out are `floats`, or of the dtype of the gradients.
  void (*normalise_back)(const void* const grads[3], Dtype dtype, const void* x, bool floats, const float* r,
                         int64_t count, Gain gain, void* out);
  // The sums of the gain += grad r x, then grad *= gain.
  void (*gain_back)(const float* x, float r, int64_t count, Gain gain, float* grad);
  // Rows of activate_quantize() and activate_back() below; `work` has count + kRowSlack floats.
  float (*activate_quantize)(Activation kind, const void* gate, const void* up, Dtype dtype, int64_t count, float eps,
                             const float* gain, float* work, int8_t* q, float* r);
  void (*activate_back)(Activation kind, const void* grad, const void* gate, const void* up, const float* r, Gain gain,
                        Dtype dtype, int64_t count, float* work, void* grad_gate, void* grad_up);
  // y = R (gain r x) of `rows` heads, whose first elements lie x_stride and y_stride apart: R rotates `planes` planes,
  // feature p and p + planes. r = 1 / sqrt(mean(x^2) + eps), or 1 where eps < 0, goes to `factors` unless that is null.
  // Without gain, it is 1.
  void (*turn)(int64_t rows, const void* x, int64_t x_stride, Dtype dtype, int64_t planes, Rotation by, float eps,
               const float* gain, void* y, int64_t y_stride, float* factors);
  // grad_x from `scale` grad_y, `grad_stride` apart; x and grad_x lie alike. `factors`: r of forward, or null where
  // that did not normalise. `work` has 2 planes + kRowSlack floats.
  void (*turn_back)(int64_t rows, const float* grad_y, int64_t grad_stride, float scale, const void* x,
                    int64_t x_stride, Dtype dtype, int64_t planes, Rotation by, const float* factors, Gain gain,
                    float* work, void* grad_x);
  // out = dtype(x * dtype(factor))
  void (*scale)(const void* x, Dtype dtype, int64_t count, float factor, void* out);
};

const BlockKernels& block_kernels_scalar();
#if defined(ARB_HAVE_AVX2)
const BlockKernels& block_kernels_avx2();
#endif
#if defined(ARB_HAVE_AVX512VNNI)
const BlockKernels& block_kernels_avx512vnni();
#endif
#if defined(ARB_HAVE_AVX512BF16)
const BlockKernels& block_kernels_avx512bf16();
#endif
#if defined(ARB_HAVE_NEON)
const BlockKernels& block_kernels_neon();
#endif

// Both tables of an instruction set, and the threads of a call.
struct BlockCall {
  const BlockKernels& block;
  const ProductKernels& rows;
  int threads;

  BlockCall(int isa, int wanted);
};

// Rows whose features lie in pieces: those of head h at position s of sequence b are the `features` elements from
// b * batch_stride + h * head_stride + s * position_stride on. Row b * length + s has the heads one after another.
struct HeadRows {
  void* memory;
  int64_t heads, features, length;
  int64_t batch_stride, head_stride, position_stride;

  int64_t columns() const { return heads * features; }
  int64_t place(int64_t row, int64_t head) const {
    return row / length * batch_stride + head * head_stride + row % length * position_stride;
  }
};

// q and scale of the rows, and r of each; where eps < 0 they are not normalised, and r is not written. `gain`, a number
// a column after the norm, may be null here and below.
void normalise_quantize(const BlockCall& call, const HeadRows& x, Dtype dtype, int64_t rows, float eps,
                        const float* gain, int8_t* q, float* scale, float* r);
// The gradient of x from those of up to three consumers of the normalised rows, [rows, columns]. `r` is null where
// forward did not normalise, without a gain; x is not read then. The sums of the gain become its gradients, added up
// in an order that the number of threads does not change.
void normalise_back(const BlockCall& call, const void* const grads[3], const HeadRows& x, const float* r, Gain gain,
                    Dtype dtype, int64_t rows, const HeadRows& out);

// q, scale and r of activate(gate, up), [rows, columns], as in normalise_quantize.
void activate_quantize(const BlockCall& call, Activation kind, const void* gate, const void* up, Dtype dtype,
                       int64_t rows, int64_t columns, float eps, const float* gain, int8_t* q, float* scale, float* r);
void activate_back(const BlockCall& call, Activation kind, const void* grad, const void* gate, const void* up,
                   const float* r, Gain gain, Dtype dtype, int64_t rows, int64_t columns, void* grad_gate,
                   void* grad_up);

// out = factor grad, [rows, columns], for y = factor x with a factor a column, whose gradients are added to its sums.
void scale_columns_back(const BlockCall& call, const void* grad, const void* x, Gain factor, Dtype dtype, int64_t rows,
                        int64_t columns, void* out);

// y [batch, heads, length, features] from x [batch * length, heads * features]; cos and sin are [length, features / 2]
// or null; r [rows, heads] is not written where eps < 0; gains are those of a head's features, the same for each.
void turn_heads(const BlockCall& call, const void* x, Dtype dtype, int64_t rows, const HeadRows& y, const float* cos,
                const float* sin, float eps, const float* gain, float* r);
void turn_heads_back(const BlockCall& call, const HeadRows& grad_y, const void* x, Dtype dtype, int64_t rows,
                     const float* cos, const float* sin, const float* r, Gain gain, void* grad_x);

// Two int8 gradients [rows, columns], fewer than 2**32 elements, and their powers of two: as they are, for which `words`
// are, and with the rows multiplied by their scales, in the dtype of `grad`, for which `folded_words` are.
void quantize_both(const BlockCall& call, const void* grad, Dtype dtype, int64_t rows, int64_t columns,
                   const float* row_scale, const HashWords& words, const HashWords& folded_words, int8_t* q,
                   int8_t* folded, float scales[2]);

}  // namespace arb
