#include "votes_linear.h"

#include <algorithm>
#include <cstring>

#include "threads.h"

namespace arb {

namespace {

// Tasks that the rows are cut into at most, whatever the number of threads: each costs a row of column sums.
constexpr int64_t kMostTasks = 64;
// Steps of the inner dimension that one task of the packing takes.
constexpr int64_t kPackedSteps = 8;
constexpr int64_t kTilePanels = kTileRows / kPanelRows;
// Tokens whose products of two int8, -128 included, are sure to fit in 32 bits.
constexpr int64_t kExactTokens = (int64_t{1} << 31) / (128 * 128) - 4;

float as_float(const void* from, Element type, int64_t i) {
  if (type == Element::float32) return static_cast<const float*>(from)[i];
  if (type == Element::int8) return static_cast<float>(static_cast<const int8_t*>(from)[i]);
  const uint32_t bits = static_cast<uint32_t>(static_cast<const uint16_t*>(from)[i]) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// `count` elements from `from[first]` on as float32, then zeros up to `width`.
void widen(const void* from, Element type, int64_t first, int64_t count, int64_t width, float* out) {
  switch (type) {
    case Element::float32:
      for (int64_t i = 0; i < count; ++i) out[i] = as_float(from, Element::float32, first + i);
      break;
    case Element::bfloat16:
      for (int64_t i = 0; i < count; ++i) out[i] = as_float(from, Element::bfloat16, first + i);
      break;
    case Element::int8:
      for (int64_t i = 0; i < count; ++i) out[i] = as_float(from, Element::int8, first + i);
      break;
  }
  std::fill(out + count, out + width, 0.0f);
}

// Both operands as the micro-kernels read them. Activations: strips of 64 columns, a strip holding its steps one after
// another. Gradient: tiles of 24 rows of 4 panels of 6 rows, a panel holding its steps one after another. A step is one
// token, or four of int8; missing tokens, rows and columns are zeros.
class Operands {
 public:
  Operands(const CastState& state, const VoteKernels& kernels, Element grad_type, const void* grad, Element x_type,
           const void* x, int64_t tokens)
      : state_(state),
        kernels_(kernels),
        integer_(grad_type == Element::int8),
        grad_type_(grad_type),
        x_type_(x_type),
        grad_(grad),
        x_(x),
        tokens_(tokens),
        steps_(integer_ ? ceil_div(tokens, 4) : tokens),
        strips_(ceil_div(state.columns, kStripColumns)),
        tiles_(ceil_div(state.rows, kTileRows)),
        panel_step_(integer_ ? kernels.panel_step : 4 * kPanelRows),
        packed_x_(strips_ * steps_ * kStepBytes),
        packed_grad_(tiles_ * kTilePanels * steps_ * panel_step_),
        starts_(integer_ ? tiles_ * kTileRows * 4 : 0) {}

  void pack(int threads) {
    auto task = [this](int64_t i, int) {
      const int64_t first = i * kPackedSteps, last = std::min(first + kPackedSteps, steps_);
      if (integer_) {
        pack_int8_x(first, last);
        pack_int8_grad(first, last);
      } else {
        pack_float_x(first, last);
        pack_float_grad(first, last);
      }
    };
    parallel_tasks(ceil_div(steps_, kPackedSteps), threads, task);
  }

  // What the sums of a tile's rows start from over some steps, because of the bias of the activations.
  void sum_rows(int64_t tile, int64_t first, int64_t last, int32_t* starts) const {
    for (int64_t p = 0; p < kTilePanels; ++p) {
      int32_t sums[kPanelRows];
      kernels_.sum_panel(panel(tile, p, first), last - first, sums);
      for (int64_t r = 0; r < kPanelRows; ++r) {
        starts[p * kPanelRows + r] = static_cast<int32_t>(0u - static_cast<uint32_t>(sums[r]) * kernels_.flip_x);
      }
    }
  }

  // The starts of a tile over all steps, kept for its column tiles.
  int32_t* starts(int64_t tile) const { return starts_.as<int32_t>() + tile * kTileRows; }

  bool integer() const { return integer_; }
  int64_t steps() const { return steps_; }
  int64_t tiles() const { return tiles_; }

  const uint8_t* strip(int64_t index, int64_t step) const {
    return packed_x_.as<uint8_t>() + (index * steps_ + step) * kStepBytes;
  }
  const int8_t* panel(int64_t tile, int64_t index, int64_t step) const {
    return packed_grad_.as<int8_t>() + ((tile * kTilePanels + index) * steps_ + step) * panel_step_;
  }

 private:
  // Pointers to four tokens' rows of int8; tokens that do not exist are zeros.
  void int8_rows(const void* from, int64_t step, int64_t width, int64_t column, int64_t count, int8_t (*copy)[64],
                 const int8_t* rows[4]) const {
    for (int64_t i = 0; i < 4; ++i) {
      const int64_t token = 4 * step + i;
      const int8_t* row = static_cast<const int8_t*>(from) + token * width + column;
      if (token < tokens_ && count == kStripColumns) {
        rows[i] = row;
        continue;
      }
      std::memset(copy[i], 0, kStripColumns);
      if (token < tokens_) std::memcpy(copy[i], row, static_cast<size_t>(count));
      rows[i] = copy[i];
    }
  }

  void pack_int8_x(int64_t first, int64_t last) const {
    int8_t copy[4][64];
    const int8_t* rows[4];
    for (int64_t strip_index = 0; strip_index < strips_; ++strip_index) {
      const int64_t column = strip_index * kStripColumns;
      const int64_t count = std::min(kStripColumns, state_.columns - column);
      for (int64_t step = first; step < last; ++step) {
        int8_rows(x_, step, state_.columns, column, count, copy, rows);
        kernels_.interleave(rows, kernels_.flip_x, const_cast<uint8_t*>(strip(strip_index, step)));
      }
    }
  }

  void pack_int8_grad(int64_t first, int64_t last) const {
    int8_t copy[4][64];
    const int8_t* rows[4];
    alignas(64) int8_t columns[kStepBytes];
    for (int64_t tile = 0; tile < tiles_; ++tile) {
      const int64_t column = tile * kTileRows;
      // 64 columns where there are as many; the tile takes the first 24.
      const int64_t count = std::min(kStripColumns, state_.rows - column);
      for (int64_t step = first; step < last; ++step) {
        int8_rows(grad_, step, state_.rows, column, count, copy, rows);
        kernels_.interleave(rows, 0, reinterpret_cast<uint8_t*>(columns));
        for (int64_t p = 0; p < kTilePanels; ++p) {
          put_panel_step(columns + 4 * kPanelRows * p, const_cast<int8_t*>(panel(tile, p, step)));
        }
      }
    }
  }

  // As it is, or with each row's four int8 as 16-bit pairs: tokens 0 and 2, tokens 1 and 3.
  void put_panel_step(const int8_t* from, int8_t* to) const {
    if (panel_step_ == 4 * kPanelRows) {
      std::memcpy(to, from, 4 * kPanelRows);
      return;
    }
    int16_t pairs[4 * kPanelRows];
    for (int64_t i = 0; i < 4 * kPanelRows; i += 4) {
      pairs[i] = from[i];
      pairs[i + 1] = from[i + 2];
      pairs[i + 2] = from[i + 1];
      pairs[i + 3] = from[i + 3];
    }
    std::memcpy(to, pairs, sizeof pairs);
  }

  void pack_float_x(int64_t first, int64_t last) const {
    for (int64_t strip_index = 0; strip_index < strips_; ++strip_index) {
      const int64_t column = strip_index * kStripColumns;
      const int64_t count = std::min(kStripColumns, state_.columns - column);
      for (int64_t step = first; step < last; ++step) {
        float* out = reinterpret_cast<float*>(const_cast<uint8_t*>(strip(strip_index, step)));
        widen(x_, x_type_, step * state_.columns + column, count, kStripColumns, out);
      }
    }
  }

  void pack_float_grad(int64_t first, int64_t last) const {
    float columns[kTileRows];
    for (int64_t tile = 0; tile < tiles_; ++tile) {
      const int64_t column = tile * kTileRows;
      const int64_t count = std::min(kTileRows, state_.rows - column);
      for (int64_t step = first; step < last; ++step) {
        widen(grad_, grad_type_, step * state_.rows + column, count, kTileRows, columns);
        for (int64_t p = 0; p < kTilePanels; ++p) {
          std::memcpy(const_cast<int8_t*>(panel(tile, p, step)), columns + kPanelRows * p, 4 * kPanelRows);
        }
      }
    }
  }

  const CastState& state_;
  const VoteKernels& kernels_;
  const bool integer_;
  const Element grad_type_, x_type_;
  const void* const grad_;
  const void* const x_;
  const int64_t tokens_, steps_, strips_, tiles_, panel_step_;
  Buffer packed_x_, packed_grad_, starts_;
};

// One task's part of the gradient: some row tiles, all columns. `memory` is the worker's, of `bytes()`.
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
        wide_(reinterpret_cast<int64_t*>(narrow_ + kTileRows * kTileColumns)) {}

  static int64_t bytes(GradientType type) {
    return kTileBytes + kTileRows * kTileColumns * (type == GradientType::int64 ? 4 + 8 : 4);
  }

  void run(int64_t task, int64_t first_tile, int64_t last_tile) {
    if (operands_.integer() && !wide()) {
      for (int64_t t = first_tile; t < last_tile; ++t) operands_.sum_rows(t, 0, operands_.steps(), operands_.starts(t));
    }
    for (int64_t start = 0; start < state_.columns; start += kTileColumns) {
      caster_.begin(tile_, task, start);
      for (int64_t t = first_tile; t < last_tile; ++t) {
        const int64_t rows = std::min(kTileRows, state_.rows - t * kTileRows);
        // Long enough before they are needed: the product comes first.
        for (int64_t r = 0; r < rows; ++r) caster_.prefetch(tile_, t * kTileRows + r, r == 0);
        const void* g = operands_.integer() ? multiply_int8(t, rows) : multiply_float(t, rows);
        const int64_t row_bytes = kTileColumns * (wide() ? 8 : 4);
        for (int64_t r = 0; r < rows; ++r) {
          const int64_t n = t * kTileRows + r;
          caster_.cast(tile_, n, n, static_cast<const char*>(g) + r * row_bytes);
        }
      }
      caster_.end(tile_);
    }
    const int64_t last_row = std::min(last_tile * kTileRows, state_.rows);
    for (int64_t n = first_tile * kTileRows; n < last_row; ++n) caster_.end_row(n, n);
  }

 private:
  static constexpr int64_t kTileBytes = (static_cast<int64_t>(sizeof(Caster::Tile)) + 63) / 64 * 64;

  // Whether a product may need more than 32 bits.
  bool wide() const { return operands_.integer() && 4 * operands_.steps() > kExactTokens; }

  const void* multiply_int8(int64_t t, int64_t rows) {
    if (!wide()) {
      multiply_int8_steps(t, rows, 0, operands_.steps(), operands_.starts(t));
      return narrow_;
    }
    std::memset(wide_, 0, kTileRows * kTileColumns * sizeof *wide_);
    for (int64_t step = 0; step < operands_.steps(); step += kExactTokens / 4) {
      const int64_t last = std::min(step + kExactTokens / 4, operands_.steps());
      int32_t starts[kTileRows];
      operands_.sum_rows(t, step, last, starts);
      multiply_int8_steps(t, rows, step, last, starts);
      for (int64_t i = 0; i < rows * kTileColumns; ++i) wide_[i] += narrow_[i];
    }
    return wide_;
  }

  void multiply_int8_steps(int64_t t, int64_t rows, int64_t first, int64_t last, const int32_t* starts) {
    const int64_t panels = ceil_div(rows, kPanelRows), columns = tile_.whole_columns();
    int64_t step = first;
    do {
      const int64_t depth = std::min(kDepth, last - step);
      for (int64_t c = 0; c < columns; c += kStripColumns) {
        const uint8_t* strip = operands_.strip((tile_.start + c) / kStripColumns, step);
        for (int64_t p = 0; p < panels; ++p) {
          kernels_.multiply_int8(operands_.panel(t, p, step), strip, depth,
                                 step == first ? starts + p * kPanelRows : nullptr,
                                 narrow_ + p * kPanelRows * kTileColumns + c, kTileColumns);
        }
      }
      step += kDepth;
    } while (step < last);
  }

  const void* multiply_float(int64_t t, int64_t rows) {
    const int64_t panels = ceil_div(rows, kPanelRows), columns = tile_.whole_columns();
    int64_t step = 0;
    do {
      const int64_t depth = std::min(kDepth, operands_.steps() - step);
      for (int64_t c = 0; c < columns; c += kStripColumns) {
        const float* strip = reinterpret_cast<const float*>(operands_.strip((tile_.start + c) / kStripColumns, step));
        for (int64_t p = 0; p < panels; ++p) {
          const float* panel = reinterpret_cast<const float*>(operands_.panel(t, p, step));
          kernels_.multiply_float(panel, strip, depth, step == 0, float_ + p * kPanelRows * kTileColumns + c,
                                  kTileColumns);
        }
      }
      step += kDepth;
    } while (step < operands_.steps());
    // A gradient that is not finite times the zeros of missing columns is NaN, which would be counted.
    for (int64_t r = 0; r < rows; ++r) {
      float* row = float_ + r * kTileColumns;
      std::fill(row + tile_.columns, row + columns, 0.0f);
    }
    return float_;
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
  operands.pack(threads);
  const int64_t tiles_a_task = ceil_div(operands.tiles(), kMostTasks);
  const int64_t tasks = ceil_div(operands.tiles(), tiles_a_task);
  GradientType type = GradientType::float32;
  if (operands.integer()) type = 4 * operands.steps() > kExactTokens ? GradientType::int64 : GradientType::int32;
  const Caster caster(state, kernels, type, state.rows, tasks, tokens * 128 * 128);
  const int64_t worker_bytes = Product::bytes(type);
  const Buffer memory(worker_bytes * std::max(threads, 1));
  auto task = [&](int64_t i, int worker) {
    Product product(state, kernels, operands, caster, memory.as<char>() + worker * worker_bytes);
    product.run(i, i * tiles_a_task, std::min((i + 1) * tiles_a_task, operands.tiles()));
  };
  parallel_tasks(tasks, threads, task);
  caster.finish(threads);
}

}  // namespace arb
