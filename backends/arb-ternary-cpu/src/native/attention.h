// Causal softmax attention, forward and backward, of heads that lie as linears write them: [batch * length, heads *
// features]. Queries and keys are normalised and turned on the way in, their gradients on the way out.
//
// A sequence and a key head are a task, with all query heads that it serves. A tile of queries meets all keys that it
// sees at once; its scores lie in the caches and are computed again in backward, from which the log of the sum of their
// exponentials is kept. Products are those of float32, or of bfloat16 with sums in float32 where the operands are
// bfloat16 and the processor multiplies it. Results depend neither on the number of threads nor on other sequences.
#pragma once

#include <cstdint>

#include "blocks.h"
#include "isa.h"
#include "products.h"

namespace arb {

// An operand: words of 32 bits, a float32 or two bfloat16 that follow one another along the terms of a product.
struct Words {
  uint32_t* first;
  int64_t stride;  // words from one row to the next
};

// Sizes are multiples of 16; of 32 where a word is two elements.
struct AttentionKernels {
  int64_t terms;  // elements of a word
  // Around the products of a task, on its thread; or null.
  void (*begin)();
  void (*end)();
  // sums [m, n] = a [m, k] b [k, n], or added to them; k in words.
  void (*multiply)(int64_t m, int64_t n, int64_t k, Words a, Words b, float* sums, int64_t stride, bool adds);
  // to [columns, rows] = from [rows, columns], word by word.
  void (*transpose)(int64_t rows, int64_t columns, Words from, Words to);
  // Words of elements 2 i and 2 i + 1 of each column of `from`, [rows, columns] elements: to [rows / 2, columns].
  void (*interleave)(int64_t rows, int64_t columns, Words from, Words to);
  // p = exp(scale (scores - most)) of what row i sees, keys 0 to first + i, and zeros up to n; most and the sum of p.
  void (*soften)(const float* scores, int64_t stride, int64_t first, int64_t rows, int64_t n, float scale, Words p,
                 float* most, float* sums);
  // With p = exp(scale scores - logs) of what a row sees: words of p along the rows, and of p (grad - dots) along the
  // keys and along the rows. Rows from `rows` to `tile` are zeros.
  void (*soften_back)(const float* scores, const float* grad, int64_t stride, int64_t first, int64_t rows, int64_t tile,
                      int64_t n, float scale, const float* logs, const float* dots, Words p, Words by_key,
                      Words by_row);
  // Dot products of rows that lie `stride` elements apart.
  void (*dots)(int64_t rows, const void* a, const void* b, int64_t stride, Dtype dtype, int64_t count, float* out);
  // out = factor x, row by row
  void (*finish)(int64_t rows, const float* x, int64_t x_stride, int64_t count, const float* factors, Dtype dtype,
                 void* out, int64_t stride);
};

const AttentionKernels& attention_scalar();
#if defined(ARB_HAVE_AVX2)
const AttentionKernels& attention_avx2();
#endif
#if defined(ARB_HAVE_AVX512VNNI)
const AttentionKernels& attention_avx512vnni();
#endif
#if defined(ARB_HAVE_NEON)
const AttentionKernels& attention_neon();
#endif
// Of operands of bfloat16.
#if defined(ARB_HAVE_AVX512BF16)
const AttentionKernels& attention_avx512bf16();
#endif
#if defined(ARB_HAVE_AMX)
const AttentionKernels& attention_amx();
#endif

const AttentionKernels& attention_kernels(int isa, Dtype dtype);

// What is attended to: queries [batch * length, heads * features], keys and values of `key_heads`, each of which serves
// heads / key_heads query heads in a row. Cosines and sines [length, features / 2] turn queries and keys, or are null;
// where an eps is negative, they are not normalised. Gains, a number a feature of a head after that, may be null. Scores
// are divided by sqrt(features), which are even in number.
struct Attended {
  const void *query, *key, *value;
  Dtype dtype;
  int64_t batch, length, heads, key_heads, features;
  const float *cos, *sin;
  float query_eps, key_eps;
  const float *query_gain, *key_gain;
};

// seen, as queries lie; logs [batch, heads, length].
void attend(const BlockCall& call, const AttentionKernels& kernels, const Attended& of, void* seen, float* logs);

// The gradients of queries, keys and values from that of `seen`; those of gains are added to what is there.
void attend_back(const BlockCall& call, const AttentionKernels& kernels, const Attended& of, const void* seen,
                 const float* logs, const void* grad, void* grad_query, void* grad_key, void* grad_value,
                 float* grad_query_gain, float* grad_key_gain);

}  // namespace arb
