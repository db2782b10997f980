#include "votes_lookup.h"

#include <algorithm>
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

}  // namespace

bool cast_lookup(const CastState& state, const VoteKernels& kernels, const int64_t* ids, Element grad_type,
                 const void* grad, int64_t tokens, int threads) {
  for (int64_t i = 0; i < tokens; ++i) {
    if (ids[i] < 0 || ids[i] >= state.rows) return false;
  }
  if (tokens == 0 || state.columns == 0) return true;
  const Order order(ids, tokens, state.rows);
  const int64_t distinct = order.distinct();
  const int64_t rows_a_task = std::max(kLeastRows, ceil_div(distinct, kMostTasks));
  const int64_t tasks = ceil_div(distinct, rows_a_task);
  const GradientType type = grad_type == Element::int8 ? GradientType::int32 : GradientType::float32;
  const Caster caster(state, kernels, type, distinct, tasks, tokens * 128);
  auto task = [&](int64_t i, int) {
    const int64_t first = i * rows_a_task, last = std::min(first + rows_a_task, distinct);
    Summed summed(grad_type, grad, state.columns);
    Caster::Tile tile;
    for (int64_t start = 0; start < state.columns; start += kTileColumns) {
      caster.begin(tile, i, start);
      for (int64_t u = first; u < last; ++u) {
        caster.cast(tile, u, ids[order.at(order.start(u))], summed(order, u, start, tile.columns));
      }
      caster.end(tile);
    }
    for (int64_t u = first; u < last; ++u) caster.end_row(u, ids[order.at(order.start(u))]);
  };
  parallel_tasks(tasks, threads, task);
  caster.finish(threads);
  return true;
}

}  // namespace arb
