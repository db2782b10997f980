// Random small decoders, and the keys and values that a step of them finds.
#pragma once

#include <cmath>
#include <cstdint>
#include <deque>
#include <vector>

#include "decode.h"
#include "numbers.h"
#include "rows_driver.h"

namespace arb {

// A decoder and the memory that it is made of.
class Model {
 public:
  DecodePlan plan;
  int64_t batch;

  explicit Model(Random& random) : random_(random), spread_(random.within(0, 15) == 0 ? 30 : random.within(0, 6)) {
    const bool large = random.within(0, 9) == 0;  // enough work for several threads
    batch = large ? kMostSequences : random.within(1, 5);
    plan.width = large ? random.within(100, 140) : random.within(1, 50);
    plan.key_heads = random.within(1, 3);
    plan.heads = plan.key_heads * random.within(1, 3);
    plan.features = 2 * random.within(1, random.within(0, 4) == 0 ? 80 : 12);
    plan.hidden = large ? random.within(700, 900) : random.within(1, 60);
    plan.vocabulary = large ? 400 : random.within(1, 40);
    plan.activation = static_cast<Activation>(random.within(0, 2));
    for (int64_t p = 0; p < plan.features / 2; ++p) plan.speeds.push_back(std::pow(100.0, -static_cast<double>(p) / 8));
    if (random.within(0, 1) == 0) {
      // Powers of two in one row would have quotients in the middle of two integers.
      plan.ternary_embedding = table(plan.vocabulary, plan.width, plan.width, 0).weight;
    } else {
      plan.embedding_dtype = static_cast<Dtype>(random.within(0, 2));
      plan.float_embedding = floats(plan.embedding_dtype, plan.vocabulary * plan.width);
    }
    const int64_t layers = random.within(1, 2);
    for (int64_t i = 0; i < layers; ++i) plan.layers.push_back(layer());
    plan.final_norm = norm(plan.width);
    if (random.within(0, 3) != 0) {
      plan.head = table(plan.vocabulary, plan.width, group());
      plan.logit_scale = 0.25f;
    }
  }
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;

  int64_t outputs() const { return plan.head.present() ? plan.vocabulary : plan.width; }

 private:
  DecodeLayer layer() {
    const int64_t attended = plan.heads * plan.features, keyed = plan.key_heads * plan.features;
    const int64_t first = group(), second = group();
    DecodeLayer made;
    made.attention_norm = norm(plan.width);
    made.query_norm = norm(plan.features);
    made.key_norm = norm(plan.features);
    made.output_norm = norm(attended);
    made.feed_norm = norm(plan.width);
    made.hidden_norm = norm(plan.hidden);
    made.query = table(attended, plan.width, first);
    made.key = table(keyed, plan.width, first);
    made.value = table(keyed, plan.width, first);
    made.output = table(plan.width, attended, group());
    if (plan.activation != Activation::relu2) made.gate = table(plan.hidden, plan.width, second);
    made.up = table(plan.hidden, plan.width, second);
    made.down = table(plan.width, plan.hidden, group());
    made.residual_scale = random_.within(0, 1) == 0 ? 1.0f : 0.5f;
    return made;
  }

  // 0 for the whole row.
  int64_t group() { return random_.within(0, 2) == 0 ? 0 : 16 << random_.within(0, 2); }

  Projection table(int64_t rows, int64_t columns, int64_t group, int64_t spread) {
    if (group == 0) group = columns;
    const int64_t groups = (columns + group - 1) / group;
    exponents_.push_back(random_.numbers<int8_t>(rows * groups, -4 - spread, -4));
    packed_.emplace_back(static_cast<size_t>(blocks_of(rows) * blocks_of(columns) * kBlockBytes));
    pack_trits(1, random_.numbers<int8_t>(rows * columns, -1, 1).data(), rows, columns, packed_.back().data());
    factors_.push_back(static_cast<float>(random_.within(50, 200)) * 0.01f);
    const float* const factor = random_.within(0, 2) == 0 ? &factors_.back() : nullptr;
    return {{packed_.back().data(), exponents_.back().data(), rows, columns, groups, group}, factor};
  }
  Projection table(int64_t rows, int64_t columns, int64_t group) { return table(rows, columns, group, spread_); }

  const void* floats(Dtype dtype, int64_t count) {
    tensors_.emplace_back(dtype, count);
    for (int64_t i = 0; i < count; ++i) {
      tensors_.back().set(i, static_cast<double>(random_.within(200, 2000)) * (random_.within(0, 1) == 0 ? 1e-3 : -1e-3));
    }
    return tensors_.back().data();
  }

  Norm norm(int64_t count) {
    Norm made;
    made.present = random_.within(0, 4) != 0;
    made.eps = 1e-5f;
    if (!made.present) return made;
    const int64_t kind = random_.within(0, 3);
    made.ternary = kind == 0;
    if (kind == 0) made.row = table(1, count, 0, 0).weight;
    if (kind == 1) {
      made.gain_dtype = static_cast<Dtype>(random_.within(0, 2));
      made.gain = floats(made.gain_dtype, count);
    }
    return made;
  }

  Random& random_;
  int64_t spread_;
  std::deque<std::vector<uint8_t>> packed_;
  std::deque<std::vector<int8_t>> exponents_;
  std::deque<float> factors_;
  std::deque<Tensor> tensors_;
};

// Keys and values, [layer][2] of [B, G, capacity, C]; where they are int8, codes, and scales [B, G, capacity] each.
struct Cache {
  Kept kept;
  std::vector<Tensor> tensors;  // floats, or scales
  std::vector<std::vector<int8_t>> codes;
  std::vector<int64_t> addresses;
  int64_t capacity, slot, past;

  Cache(Random& random, const Model& model)
      : kept(static_cast<Kept>(random.within(0, 2))),
        capacity(random.within(1, random.within(0, 5) == 0 ? 200 : 12)),
        slot(random.within(0, capacity - 1)),
        past(random.within(0, slot)) {
    const int64_t rows = model.batch * model.plan.key_heads * capacity, count = rows * model.plan.features;
    for (size_t i = 0; i < 2 * model.plan.layers.size(); ++i) {
      if (kept == Kept::int8) {
        codes.push_back(random.numbers<int8_t>(count, -127, 127));
        tensors.emplace_back(Dtype::float32, rows);
        for (int64_t j = 0; j < rows; ++j) tensors.back().set(j, static_cast<double>(random.within(0, 12)) * 1e-3);
        continue;
      }
      tensors.emplace_back(kept == Kept::bfloat16 ? Dtype::bfloat16 : Dtype::float32, count);
      for (int64_t j = 0; j < count; ++j) tensors.back().set(j, static_cast<double>(random.within(-1500, 1500)) * 1e-3);
    }
  }

  // What attention reads at element `feature` of a row.
  double at(size_t which, int64_t row, int64_t features, int64_t feature) const {
    if (kept != Kept::int8) return tensors[which][row * features + feature];
    return codes[which][static_cast<size_t>(row * features + feature)] * tensors[which][row];
  }

  bool operator==(const Cache& other) const { return tensors == other.tensors && codes == other.codes; }

  // That of one sequence.
  Cache alone(const DecodePlan& plan, int64_t sequence) const {
    Cache made = *this;
    const int64_t rows = plan.key_heads * capacity, count = rows * plan.features;
    for (Tensor& tensor : made.tensors) {
      const int64_t size = kept == Kept::int8 ? rows : count;
      Tensor own(tensor.dtype(), size);
      for (int64_t j = 0; j < size; ++j) own.set(j, tensor[sequence * size + j]);
      tensor = own;
    }
    for (std::vector<int8_t>& all : made.codes) {
      const auto first = all.begin() + sequence * count;
      all = std::vector<int8_t>(first, first + count);
    }
    return made;
  }

  // Whether all but the new position is as in `other`.
  bool keeps(const Cache& other, int64_t features) const {
    for (size_t i = 0; i < tensors.size(); ++i) {
      const int64_t rows = kept == Kept::int8 ? tensors[i].size() : tensors[i].size() / features;
      for (int64_t row = 0; row < rows; ++row) {
        if (row % capacity == slot) continue;
        if (kept == Kept::int8 && tensors[i][row] != other.tensors[i][row]) return false;
        for (int64_t c = 0; c < features; ++c) {
          const size_t j = static_cast<size_t>(row * features + c);
          const bool same = kept == Kept::int8 ? codes[i][j] == other.codes[i][j]
                                               : at(i, row, features, c) == other.at(i, row, features, c);
          if (!same) return false;
        }
      }
    }
    return true;
  }

  bool step(Isa isa, int threads, const DecodePlan& plan, const std::vector<int64_t>& ids, double position, Tensor& out) {
    addresses.clear();
    for (size_t i = 0; i < tensors.size(); i += 2) {
      for (size_t j = i; j < i + 2 && kept == Kept::int8; ++j) {
        addresses.push_back(reinterpret_cast<int64_t>(codes[j].data()));
      }
      for (size_t j = i; j < i + 2; ++j) addresses.push_back(reinterpret_cast<int64_t>(tensors[j].data()));
    }
    return decode_step(static_cast<int>(isa), threads, plan, static_cast<int64_t>(ids.size()), ids.data(), position,
                       {addresses.data(), kept, capacity, slot, past}, out.data(), out.dtype());
  }
};

}  // namespace arb
