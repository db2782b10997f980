#include "votes_linear.h"

#include <algorithm>
#include <cstring>

#include "crew.h"
#include "votes_operands.h"

namespace arb {

namespace {

// Tasks that the rows are cut into at most, whatever the number of threads: each costs a row of column sums.
constexpr int64_t kMostTasks = 64;
// Tokens whose products of two int8, -128 included, are sure to fit in 32 bits.
constexpr int64_t kExactTokens = (int64_t{1} << 31) / (128 * 128) - 4 * kTileSteps;
static_assert(kExactTokens / 4 % kTileSteps == 0, "their steps fill whole blocks");

// Times that a thread takes tasks at least: few, since it reads all activations every time, but enough to even out. And
// row tiles that it takes at most: every row of the accumulators lies in a page of its own.
constexpr int64_t kTurns = 4;
constexpr int64_t kTurnTiles = 8;
// Rows whose votes and codes are fetched before they are cast.
constexpr int64_t kRowsAhead = 6;

// Some tasks' part of the gradient: their row tiles, all columns. `memory` is the worker's, of `bytes()`.
class Product {
 public:
  Product(const CastState& state, const VoteKernels& kernels, const Operands& operands, const Caster& caster,
          void* memory)
      : state_(state),
        kernels_(kernels),
        operands_(operands),
        caster_(caster),
        tile_(*static_cast<Caster::Tile*>(memory)),
        narrow_(reinterpret_cast<int32_t*>(static_cast<char*>(memory) + kTileBytes)),
        float_(reinterpret_cast<float*>(narrow_)),
        wide_(reinterpret_cast<int64_t*>(narrow_ + kTileRows * kTilePitch)) {}

  static int64_t bytes(GradientType type) {
    return kTileBytes + kTileRows * kTilePitch * (type == GradientType::int64 ? 4 + 8 : 4);
  }

  // Those tasks of which each has `tiles_a_task` row tiles: column by column, so that the activations of a column tile
  // are read from memory once and by all of them from the second-level cache.
  void run(int64_t first_task, int64_t last_task, int64_t tiles_a_task) {
    const int64_t first = first_task * tiles_a_task, last = std::min(last_task * tiles_a_task, operands_.tiles());
    if (operands_.integer() && !operands_.blocks() && !wide()) {
      for (int64_t t = first; t < last; ++t) operands_.sum_rows(t, 0, operands_.steps(), operands_.starts(t));
    }
    for (int64_t start = 0; start < state_.columns; start += kTileColumns) {
      for (int64_t task = first_task; task < last_task; ++task) {
        caster_.begin(tile_, task, start);
        for (int64_t t = task * tiles_a_task; t < std::min((task + 1) * tiles_a_task, last); ++t) run_tile(t, start);
        caster_.end(tile_);
      }
    }
    const int64_t last_row = std::min(last * kTileRows, state_.rows);
    for (int64_t n = first * kTileRows; n < last_row; ++n) caster_.end_row(n, n);
  }

 private:
  static constexpr int64_t kTileBytes = (static_cast<int64_t>(sizeof(Caster::Tile)) + 63) / 64 * 64;

  void run_tile(int64_t t, int64_t start) {
    const int64_t rows = std::min(kTileRows, state_.rows - t * kTileRows);
    // Of the first rows the product comes before they are needed. The processor has few requests under way at a time
    // and would wait where there are more.
    for (int64_t r = 0; r < std::min(rows, kRowsAhead); ++r) caster_.prefetch(start, t * kTileRows + r, r == 0);
    const void* g = operands_.integer() ? multiply_int8(t, rows) : multiply_float(t, rows);
    const int64_t row_bytes = kTilePitch * (wide() ? 8 : 4);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t n = t * kTileRows + r;
      if (r + kRowsAhead < rows) caster_.prefetch(start, n + kRowsAhead, false);
      caster_.cast(tile_, n, n, static_cast<const char*>(g) + r * row_bytes);
    }
  }

  // Whether a product may need more than 32 bits.
  bool wide() const { return operands_.integer() && 4 * operands_.steps() > kExactTokens; }

  const void* multiply_int8(int64_t t, int64_t rows) {
    if (!wide()) {
      multiply_int8_steps(t, rows, 0, operands_.steps(), operands_.starts(t));
      return narrow_;
    }
    std::memset(wide_, 0, kTileRows * kTilePitch * sizeof *wide_);
    for (int64_t step = 0; step < operands_.steps(); step += kExactTokens / 4) {
      const int64_t last = std::min(step + kExactTokens / 4, operands_.steps());
      int32_t starts[kTileRows];
      if (!operands_.blocks()) operands_.sum_rows(t, step, last, starts);
      multiply_int8_steps(t, rows, step, last, starts);
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t i = r * kTilePitch; i < r * kTilePitch + kTileColumns; ++i) wide_[i] += narrow_[i];
      }
    }
    return wide_;
  }

  void multiply_int8_steps(int64_t t, int64_t rows, int64_t first, int64_t last, const int32_t* starts) {
    if (operands_.blocks()) {
      multiply_blocks(t, rows, first, last);
      return;
    }
    const int64_t panels = ceil_div(rows, kPanelRows), columns = tile_.whole_columns();
    int64_t step = first;
    do {
      const int64_t depth = std::min(kDepth, last - step);
      for (int64_t c = 0; c < columns; c += kStripColumns) {
        const uint8_t* strip = operands_.strip((tile_.start + c) / kStripColumns, step);
        for (int64_t p = 0; p < panels; ++p) {
          kernels_.multiply_int8(operands_.panel(t, p, step), strip, depth,
                                 step == first ? starts + p * kPanelRows : nullptr,
                                 narrow_ + p * kPanelRows * kTilePitch + c, kTilePitch);
        }
      }
      step += kDepth;
    } while (step < last);
  }

  void multiply_float_panel(const int8_t* panel, const uint8_t* strip, int64_t depth, bool fresh, float* c) const {
    if (operands_.pairs()) {
      kernels_.multiply_pairs(reinterpret_cast<const uint32_t*>(panel), reinterpret_cast<const uint32_t*>(strip), depth,
                              fresh, c, kTilePitch);
    } else {
      kernels_.multiply_float(reinterpret_cast<const float*>(panel), reinterpret_cast<const float*>(strip), depth,
                              fresh, c, kTilePitch);
    }
  }

  void multiply_blocks(int64_t t, int64_t rows, int64_t first, int64_t last) {
    const auto multiply = operands_.integer() ? kernels_.multiply_tile_int8 : kernels_.multiply_tile_pairs;
    multiply(operands_.block(t, first), rows, operands_.strip(tile_.start / kStripColumns, first),
             operands_.strip_stride(), tile_.whole_columns(), last - first, narrow_);
  }

  const void* multiply_float(int64_t t, int64_t rows) {
    if (operands_.blocks()) {
      multiply_blocks(t, rows, 0, operands_.steps());
    } else {
      multiply_panels(t, rows);
    }
    // A gradient that is not finite times the zeros of missing columns is NaN, which would be counted.
    for (int64_t r = 0; r < rows; ++r) {
      float* row = float_ + r * kTilePitch;
      std::fill(row + tile_.columns, row + tile_.whole_columns(), 0.0f);
    }
    return float_;
  }

  void multiply_panels(int64_t t, int64_t rows) {
    const int64_t panels = ceil_div(rows, kPanelRows), columns = tile_.whole_columns();
    int64_t step = 0;
    do {
      const int64_t depth = std::min(kDepth, operands_.steps() - step);
      for (int64_t c = 0; c < columns; c += kStripColumns) {
        const uint8_t* strip = operands_.strip((tile_.start + c) / kStripColumns, step);
        for (int64_t p = 0; p < panels; ++p) {
          multiply_float_panel(operands_.panel(t, p, step), strip, depth, step == 0,
                               float_ + p * kPanelRows * kTilePitch + c);
        }
      }
      step += kDepth;
    } while (step < operands_.steps());
  }

  const CastState& state_;
  const VoteKernels& kernels_;
  const Operands& operands_;
  const Caster& caster_;
  Caster::Tile& tile_;
  // The tile of the gradient: 32 bits wide, and where that may not suffice the sum of several such.
  int32_t* const narrow_;
  float* const float_;
  int64_t* const wide_;
};

}  // namespace

void cast_linear(const CastState& state, const VoteKernels& kernels, Element grad_type, const void* grad,
                 Element x_type, const void* x, int64_t tokens, int threads) {
  if (state.rows == 0 || state.columns == 0) return;
  Operands operands(state, kernels, grad_type, grad, x_type, x, tokens);
  const int64_t tiles_a_task = ceil_div(operands.tiles(), kMostTasks);
  const int64_t tasks = ceil_div(operands.tiles(), tiles_a_task);
  GradientType type = GradientType::float32;
  if (operands.integer()) type = 4 * operands.steps() > kExactTokens ? GradientType::int64 : GradientType::int32;
  const Caster caster(state, kernels, type, state.rows, tasks, tokens * 128 * 128);
  const int64_t worker_bytes = Product::bytes(type);
  const Buffer memory(worker_bytes * std::max(threads, 1));
  // Sums are those of tasks, whoever runs them and with which others.
  const int64_t fair = ceil_div(tasks, kTurns * std::max(threads, 1));
  const int64_t tasks_a_turn = std::min(fair, std::max<int64_t>(1, kTurnTiles / tiles_a_task));
  Crew crew(threads);
  crew.work([&](Crew::Member& member, int worker) {
    operands.pack(member);
    Product product(state, kernels, operands, caster, memory.as<char>() + worker * worker_bytes);
    member.each(ceil_div(tasks, tasks_a_turn), [&](int64_t i) {
      product.run(i * tasks_a_turn, std::min((i + 1) * tasks_a_turn, tasks), tiles_a_task);
    });
  });
  caster.finish(threads);
}

}  // namespace arb
