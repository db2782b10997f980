// Tokens through a plain decoder: what it is made of, and the loops that are not products.
#pragma once

#include <cstdint>
#include <vector>

#include "activation.h"
#include "product_driver.h"
#include "products.h"

namespace arb {

// Sequences that a step of one token each takes at most.
constexpr int64_t kMostSequences = 16;

// What the gain of a norm is: nothing, a row of floats, or a ternary weight of one row.
struct Norm {
  bool present = false;
  float eps = 0.0f;
  const void* gain = nullptr;
  Dtype gain_dtype = Dtype::float32;
  bool ternary = false;
  Weight row = {};
};

// A ternary linear; `factor` multiplies its results, null for 1: one number, or, `by_rows`, one for each output.
struct Projection {
  Weight weight = {};
  const float* factor = nullptr;
  bool by_rows = false;

  bool present() const { return weight.packed != nullptr; }
};

struct DecodeLayer {
  Norm attention_norm, query_norm, key_norm, output_norm, feed_norm, hidden_norm;
  Projection query, key, value, output, gate, up, down;
  float residual_scale = 1.0f;
};

// A decoder whose weights belong to someone else. Sizes: D width, H query heads, G key heads, C features of a head,
// F hidden features, V ids.
struct DecodePlan {
  int64_t width = 0, heads = 0, key_heads = 0, features = 0, hidden = 0, vocabulary = 0;
  Activation activation = Activation::relu2;
  Weight ternary_embedding = {};  // packed is null where the embedding is float
  const void* float_embedding = nullptr;
  Dtype embedding_dtype = Dtype::float32;
  Norm final_norm;
  Projection head;  // not present: the result is what the final norm gives
  float logit_scale = 1.0f;
  std::vector<double> speeds;  // radians a position, [C / 2]
  std::vector<DecodeLayer> layers;

  // Multiply-accumulates of a token.
  double work() const;
};

// What keys and values are kept as: floats, or int8 with a scale for each row of a position and head.
enum class Kept : int { float32 = 0, bfloat16 = 1, int8 = 2 };

static inline int64_t kept_size(Kept kept) { return kept == Kept::float32 ? 4 : kept == Kept::bfloat16 ? 2 : 1; }

// Keys and values in blocks of positions: addresses of [blocks, G, size, C], [layer][2]; or, where they are int8,
// [layer][4] with those of the scales, float32 [blocks, G, size], behind. Position t of sequence s lies in the block
// tables[s * table_width + t / size].
struct DecodeCache {
  const int64_t* addresses;
  Kept kept;
  int64_t blocks, size;
  const int64_t* tables;
  int64_t sequences, table_width;

  int64_t parts() const { return kept == Kept::int8 ? 4 : 2; }
};

// The tokens of a step, of any number of sequences: token r goes to slots[r] of its sequence, and sees the `pasts[r]`
// slots before it, also those that this step writes. `positions` turn queries and keys. Results are wanted of some
// tokens, in ascending order.
struct DecodeRows {
  int64_t count;
  const int64_t* ids;
  const int64_t* sequences;
  const int64_t* slots;
  const int64_t* pasts;
  const double* positions;
  int64_t wanted_count;
  const int64_t* wanted;
};

// The keys or the values of a head of a sequence, in blocks of `size` rows that begin `stride` rows apart.
struct KeptRows {
  const void* rows;
  const float* scales;  // null where they are not int8
  const int64_t* table;
  int64_t size, stride, features;
  Kept kept;

  int64_t row(int64_t slot) const { return table[slot / size] * stride + slot % size; }
  const void* at(int64_t slot) const { return static_cast<const char*>(rows) + row(slot) * features * kept_size(kept); }
  const float* scales_at(int64_t slot) const { return scales + row(slot); }
};

// The logits [W, V], or normalised rows [W, D], of the tokens that are wanted. False where an id, a sequence, a slot or
// a block does not exist, and nothing was written; or where exponents spread too far for sums of 32 bits: then the
// result is undefined, and of the cache only the slots of the tokens were written.
bool decode_rows(int isa, int threads, const DecodePlan& plan, const DecodeRows& rows, const DecodeCache& cache,
                 void* out, Dtype dtype);

// One token of each sequence, all at the same place: `addresses` are those of [B, G, capacity, C].
struct DecodeStepCache {
  const int64_t* addresses;
  Kept kept;
  int64_t capacity, slot, past;
};
bool decode_step(int isa, int threads, const DecodePlan& plan, int64_t batch, const int64_t* ids, double position,
                 const DecodeStepCache& cache, void* out, Dtype dtype);

// The loops of a step; they read and write beyond no stated count.
struct DecodeKernels {
  // out = x / sqrt(mean(x^2) + eps) * gain; `gain` may be null, `out` may be x.
  void (*norm_row)(const float* x, int64_t count, float eps, const float* gain, float* out);
  void (*to_floats)(const void* x, Dtype dtype, int64_t count, float* out);
  void (*from_floats)(const float* x, int64_t count, void* out, Dtype dtype);
  // Turns planes, spanned by elements p and p + planes, by their angles.
  void (*rotate)(float* x, const float* cos, const float* sin, int64_t planes);
  // Softmax attention of one query over `past` slots before `slot` and that slot; what is int8 counts as code * scale.
  // Scores are multiplied by `scale`; `scores` has room for past + 1 floats rounded up to 16, `spare` for a number for
  // each feature.
  void (*attend)(const float* query, const KeptRows& keys, const KeptRows& values, int64_t slot, int64_t past,
                 float scale, float* scores, float* spare, float* out);
  // up[i] = act(gate, up); relu2 takes no gate.
  void (*activate)(Activation activation, const float* gate, float* up, int64_t count);
};

const DecodeKernels& decode_scalar();
const DecodeKernels& decode_avx2();
const DecodeKernels& decode_avx512vnni();
const DecodeKernels& decode_neon();

// The table of an instruction set, by its index; the scalar one where it was not compiled.
const DecodeKernels& decode_kernels(int isa);

}  // namespace arb
