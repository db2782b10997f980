// The operands of a weight's gradient, packed as the micro-kernels read them.
#pragma once

#include <algorithm>
#include <cstring>

#include "threads.h"
#include "votes_task.h"

namespace arb {

namespace {

// Steps of the inner dimension that one task of the packing takes.
constexpr int64_t kPackedSteps = 8;
constexpr int64_t kTilePanels = kTileRows / kPanelRows;
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

// What is multiplied: int8, exactly; bfloat16 (a gradient of it, and activations that it holds exactly); or float32.
enum class Factors { int8, bfloat16, float32 };

Factors factors_of(const VoteKernels& kernels, Element grad_type, Element x_type) {
  if (grad_type == Element::int8) return Factors::int8;
  const bool fits = grad_type == Element::bfloat16 && x_type != Element::float32;
  return fits && kernels.multiply_pairs != nullptr ? Factors::bfloat16 : Factors::float32;
}

int64_t tokens_of_step(Factors factors) { return factors == Factors::int8 ? 4 : factors == Factors::bfloat16 ? 2 : 1; }

// Both operands as the micro-kernels read them. Activations: strips of 64 columns, a strip holding its steps one after
// another. Gradient: tiles of 24 rows of 4 panels of 6 rows, a panel holding its steps one after another. A step is
// four bytes a row or column: one token, two of bfloat16, or four of int8; missing tokens, rows and columns are zeros.
class Operands {
 public:
  Operands(const CastState& state, const VoteKernels& kernels, Element grad_type, const void* grad, Element x_type,
           const void* x, int64_t tokens)
      : state_(state),
        kernels_(kernels),
        factors_(factors_of(kernels, grad_type, x_type)),
        grad_type_(grad_type),
        x_type_(x_type),
        grad_(grad),
        x_(x),
        tokens_(tokens),
        steps_(ceil_div(tokens, tokens_of_step(factors_))),
        strips_(ceil_div(state.columns, kStripColumns)),
        tiles_(ceil_div(state.rows, kTileRows)),
        panel_step_(integer() ? kernels.panel_step : 4 * kPanelRows),
        packed_x_(strips_ * steps_ * kStepBytes),
        packed_grad_(tiles_ * kTilePanels * steps_ * panel_step_),
        starts_(integer() ? tiles_ * kTileRows * 4 : 0) {}

  void pack(int threads) {
    auto task = [this](int64_t i, int) {
      const int64_t first = i * kPackedSteps, last = std::min(first + kPackedSteps, steps_);
      switch (factors_) {
        case Factors::int8:
          pack_int8_x(first, last);
          pack_int8_grad(first, last);
          break;
        case Factors::bfloat16:
          pack_pairs_x(first, last);
          pack_pairs_grad(first, last);
          break;
        case Factors::float32:
          pack_float_x(first, last);
          pack_float_grad(first, last);
          break;
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

  bool integer() const { return factors_ == Factors::int8; }
  bool pairs() const { return factors_ == Factors::bfloat16; }
  int64_t steps() const { return steps_; }
  int64_t tiles() const { return tiles_; }

  const uint8_t* strip(int64_t index, int64_t step) const {
    return packed_x_.as<uint8_t>() + (index * steps_ + step) * kStepBytes;
  }
  const int8_t* panel(int64_t tile, int64_t index, int64_t step) const {
    return packed_grad_.as<int8_t>() + ((tile * kTilePanels + index) * steps_ + step) * panel_step_;
  }

 private:
  // Pointers to 64 columns of the tokens of a step; tokens and columns that do not exist are zeros.
  template <class T, int kTokens>
  struct TokenRows {
    const T* rows[kTokens];
    T copy[kTokens][kStripColumns];

    void find(const Operands& operands, const void* from, int64_t step, int64_t width, int64_t column) {
      const int64_t count = std::min(kStripColumns, width - column);
      for (int64_t i = 0; i < kTokens; ++i) {
        const int64_t token = kTokens * step + i;
        const bool exists = token < operands.tokens_;
        if (exists && count == kStripColumns) {
          rows[i] = static_cast<const T*>(from) + token * width + column;
          continue;
        }
        std::memset(copy[i], 0, sizeof copy[i]);
        if (exists) {
          std::memcpy(copy[i], static_cast<const T*>(from) + token * width + column,
                      static_cast<size_t>(count) * sizeof(T));
        }
        rows[i] = copy[i];
      }
    }
  };

  void pack_int8_x(int64_t first, int64_t last) const {
    TokenRows<int8_t, 4> four;
    for (int64_t i = 0; i < strips_; ++i) {
      for (int64_t step = first; step < last; ++step) {
        four.find(*this, x_, step, state_.columns, i * kStripColumns);
        kernels_.interleave(four.rows, kernels_.flip_x, const_cast<uint8_t*>(strip(i, step)));
      }
    }
  }

  void pack_int8_grad(int64_t first, int64_t last) const {
    TokenRows<int8_t, 4> four;
    alignas(64) int8_t columns[kStepBytes];
    for (int64_t tile = 0; tile < tiles_; ++tile) {
      for (int64_t step = first; step < last; ++step) {
        // 64 columns; the tile takes the first 24.
        four.find(*this, grad_, step, state_.rows, tile * kTileRows);
        kernels_.interleave(four.rows, 0, reinterpret_cast<uint8_t*>(columns));
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

  void pack_pairs_x(int64_t first, int64_t last) const {
    TokenRows<int8_t, 2> bytes;
    TokenRows<uint16_t, 2> words;
    for (int64_t i = 0; i < strips_; ++i) {
      for (int64_t step = first; step < last; ++step) {
        uint32_t* const to = reinterpret_cast<uint32_t*>(const_cast<uint8_t*>(strip(i, step)));
        if (x_type_ == Element::int8) {
          bytes.find(*this, x_, step, state_.columns, i * kStripColumns);
          kernels_.pair_int8(bytes.rows, to);
        } else {
          words.find(*this, x_, step, state_.columns, i * kStripColumns);
          kernels_.pair_bfloat16(words.rows, to);
        }
      }
    }
  }

  void pack_pairs_grad(int64_t first, int64_t last) const {
    TokenRows<uint16_t, 2> words;
    alignas(64) uint32_t columns[kStripColumns];
    for (int64_t tile = 0; tile < tiles_; ++tile) {
      for (int64_t step = first; step < last; ++step) {
        words.find(*this, grad_, step, state_.rows, tile * kTileRows);
        kernels_.pair_bfloat16(words.rows, columns);
        for (int64_t p = 0; p < kTilePanels; ++p) {
          std::memcpy(const_cast<int8_t*>(panel(tile, p, step)), columns + kPanelRows * p, 4 * kPanelRows);
        }
      }
    }
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
  const Factors factors_;
  const Element grad_type_, x_type_;
  const void* const grad_;
  const void* const x_;
  const int64_t tokens_, steps_, strips_, tiles_, panel_step_;
  Buffer packed_x_, packed_grad_, starts_;
};

}  // namespace

}  // namespace arb
