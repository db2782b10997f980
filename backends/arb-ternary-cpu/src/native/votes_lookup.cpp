#include "votes_lookup.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

#include "threads.h"

namespace arb {

namespace {

// Tasks that the distinct rows are cut into at most, and rows of a task at least.
constexpr int64_t kMostTasks = 64;
constexpr int64_t kLeastRows = 8;

// Positions of tokens by id, those of equal ids in their order, and where each distinct id begins.
struct Order {
  std::vector<int64_t> tokens;
  std::vector<int64_t> starts;  // one more than there are distinct ids

  Order(const int64_t* ids, int64_t count, int64_t rows) : tokens(static_cast<size_t>(count)) {
    if (rows <= 4 * count + 65536) {
      by_counting(ids, rows);
    } else {
      std::iota(tokens.begin(), tokens.end(), 0);
      std::stable_sort(tokens.begin(), tokens.end(), [ids](int64_t a, int64_t b) { return ids[a] < ids[b]; });
    }
    for (int64_t i = 0; i < count; ++i) {
      if (i == 0 || ids[at(i)] != ids[at(i - 1)]) starts.push_back(i);
    }
    starts.push_back(count);
  }

  int64_t at(int64_t i) const { return tokens[static_cast<size_t>(i)]; }
  int64_t start(int64_t i) const { return starts[static_cast<size_t>(i)]; }
  int64_t distinct() const { return static_cast<int64_t>(starts.size()) - 1; }

 private:
  void by_counting(const int64_t* ids, int64_t rows) {
    std::vector<int64_t> next(static_cast<size_t>(rows) + 1);
    for (size_t i = 0; i < tokens.size(); ++i) ++next[static_cast<size_t>(ids[i]) + 1];
    std::partial_sum(next.begin(), next.end(), next.begin());
    for (size_t i = 0; i < tokens.size(); ++i) {
      tokens[static_cast<size_t>(next[static_cast<size_t>(ids[i])]++)] = static_cast<int64_t>(i);
    }
  }
};

float bfloat16_as_float(uint16_t value) {
  const uint32_t bits = static_cast<uint32_t>(value) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

// Sums of some columns of some rows of a gradient.
class Summed {
 public:
  Summed(Element type, const void* grad, int64_t width) : type_(type), grad_(grad), width_(width) {}

  const void* operator()(const Order& order, int64_t u, int64_t first, int64_t count) {
    std::memset(floats_, 0, sizeof floats_);
    std::memset(integers_, 0, sizeof integers_);
    for (int64_t i = order.start(u); i < order.start(u + 1); ++i) add(order.at(i) * width_ + first, count);
    return type_ == Element::int8 ? static_cast<const void*>(integers_) : floats_;
  }

 private:
  void add(int64_t offset, int64_t count) {
    if (type_ == Element::float32) {
      const float* from = static_cast<const float*>(grad_) + offset;
      for (int64_t c = 0; c < count; ++c) floats_[c] += from[c];
    } else if (type_ == Element::bfloat16) {
      const uint16_t* from = static_cast<const uint16_t*>(grad_) + offset;
      for (int64_t c = 0; c < count; ++c) floats_[c] += bfloat16_as_float(from[c]);
    } else {
      const int8_t* from = static_cast<const int8_t*>(grad_) + offset;
      for (int64_t c = 0; c < count; ++c) integers_[c] += from[c];
    }
  }

  const Element type_;
  const void* const grad_;
  const int64_t width_;
  alignas(64) float floats_[kTileColumns];
  alignas(64) int32_t integers_[kTileColumns];
};

// The gradients of a row that are all the same.
class Repeated {
 public:
  explicit Repeated(const float* grad) : grad_(grad) {}

  const void* operator()(int64_t n, int64_t, int64_t count) {
    // As where gradients are added to 0: that of -0 is 0.
    std::fill(floats_, floats_ + count, 0.0f + grad_[n]);
    std::fill(floats_ + count, floats_ + ceil_div(count, kStripColumns) * kStripColumns, 0.0f);
    return floats_;
  }

 private:
  const float* const grad_;
  alignas(64) float floats_[kTileColumns];
};

// Casts the votes of the rows `row_of(u)`, 0 <= u < `distinct`. Every task makes a function of (u, first column, columns)
// that returns the gradients of a row; those beyond the columns of the weight are 0.
template <class RowOf, class MakeGradients>
void cast_rows(const CastState& state, const VoteKernels& kernels, GradientType type, int64_t distinct, int64_t largest,
               int threads, RowOf row_of, MakeGradients make_gradients) {
  const int64_t rows_a_task = std::max(kLeastRows, ceil_div(distinct, kMostTasks));
  const int64_t tasks = ceil_div(distinct, rows_a_task);
  const Caster caster(state, kernels, type, distinct, tasks, largest);
  auto task = [&](int64_t i, int) {
    const int64_t first = i * rows_a_task, last = std::min(first + rows_a_task, distinct);
    auto gradients = make_gradients();
    Caster::Tile tile;
    for (int64_t start = 0; start < state.columns; start += kTileColumns) {
      caster.begin(tile, i, start);
      for (int64_t u = first; u < last; ++u) caster.cast(tile, u, row_of(u), gradients(u, start, tile.columns));
      caster.end(tile);
    }
    for (int64_t u = first; u < last; ++u) caster.end_row(u, row_of(u));
  };
  parallel_tasks(tasks, threads, task);
  caster.finish(threads);
}

}  // namespace

bool cast_lookup(const CastState& state, const VoteKernels& kernels, const int64_t* ids, Element grad_type,
                 const void* grad, int64_t tokens, int threads) {
  for (int64_t i = 0; i < tokens; ++i) {
    if (ids[i] < 0 || ids[i] >= state.rows) return false;
  }
  if (tokens == 0 || state.columns == 0) return true;
  const Order order(ids, tokens, state.rows);
  const GradientType type = grad_type == Element::int8 ? GradientType::int32 : GradientType::float32;
  cast_rows(
      state, kernels, type, order.distinct(), tokens * 128, threads,
      [&](int64_t u) { return ids[order.at(order.start(u))]; },
      [&] {
        return [&order, summed = Summed(grad_type, grad, state.columns)](int64_t u, int64_t first,
                                                                         int64_t count) mutable {
          return summed(order, u, first, count);
        };
      });
  return true;
}

void cast_repeated(const CastState& state, const VoteKernels& kernels, const float* grad) {
  if (state.rows == 0 || state.columns == 0) return;
  cast_rows(
      state, kernels, GradientType::float32, state.rows, state.rows * 128, 1, [](int64_t n) { return n; },
      [grad] { return Repeated(grad); });
}

void sum_rows(const uint8_t* packed, const int8_t* exponent, int64_t rows, int64_t columns, float* values) {
  for (int64_t n = 0; n < rows; ++n) {
    int32_t sum = 0;
    for (int64_t c = 0; c < columns; ++c) {
      const uint8_t byte = packed[code_offset(columns, n, c) + c % 4];
      sum += ((byte >> (c % kBlock / 4 * 2)) & 3) - 1;
    }
    values[n] = 1.0f + std::ldexp(static_cast<float>(sum), exponent[n]);
  }
}

}  // namespace arb
