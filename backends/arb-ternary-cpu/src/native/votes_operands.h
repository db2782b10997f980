// The operands of a weight's gradient, packed as the micro-kernels read them.
#pragma once

#include <algorithm>
#include <cstring>

#include "crew.h"
#include "votes_task.h"

namespace arb {

namespace {

// Steps of the inner dimension that one task of the packing takes, and strips or tiles.
constexpr int64_t kPackedSteps = 16;
constexpr int64_t kPackedPieces = 16;
static_assert(kPackedSteps % kTileSteps == 0, "a task makes whole blocks");
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
// Where products are made of square registers, a tile of the gradient holds blocks of 16 rows x kTileSteps steps
// instead of panels: those of the first steps one below the other, then those of the next steps.
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
        blocks_(factors_ == Factors::int8 ? kernels.multiply_tile_int8 != nullptr
                                          : pairs() && kernels.multiply_tile_pairs != nullptr),
        steps_(whole_steps(ceil_div(tokens, tokens_of_step(factors_)))),
        strips_(ceil_div(state.columns, kStripColumns)),
        tiles_(ceil_div(state.rows, kTileRows)),
        panel_step_(integer() ? kernels.panel_step : 4 * kPanelRows),
        packed_x_(strips_ * steps_ * kStepBytes),
        packed_grad_(tiles_ * kTilePanels * steps_ * panel_step_),
        starts_(integer() ? tiles_ * kTileRows * 4 : 0) {}

  // A stage.
  void pack(Crew::Member& member) {
    const int64_t of_x = ceil_div(strips_, kPackedPieces), of_grad = ceil_div(tiles_, kPackedPieces);
    member.each(ceil_div(steps_, kPackedSteps) * (of_x + of_grad), [=](int64_t i) {
      const int64_t first = i / (of_x + of_grad) * kPackedSteps, last = std::min(first + kPackedSteps, steps_);
      const int64_t piece = i % (of_x + of_grad);
      if (piece < of_x) {
        const int64_t strip = piece * kPackedPieces;
        pack_x(strip, std::min(strip + kPackedPieces, strips_), first, last);
      } else {
        const int64_t tile = (piece - of_x) * kPackedPieces;
        pack_grad(tile, std::min(tile + kPackedPieces, tiles_), first, last);
      }
    });
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
  bool blocks() const { return blocks_; }
  int64_t steps() const { return steps_; }
  int64_t tiles() const { return tiles_; }

  const uint8_t* strip(int64_t index, int64_t step) const {
    return packed_x_.as<uint8_t>() + (index * steps_ + step) * kStepBytes;
  }
  const int8_t* panel(int64_t tile, int64_t index, int64_t step) const {
    return packed_grad_.as<int8_t>() + ((tile * kTilePanels + index) * steps_ + step) * panel_step_;
  }
  const uint32_t* block(int64_t tile, int64_t step) const {
    return packed_grad_.as<uint32_t>() + (tile * steps_ + step) * kTileRows;
  }
  // Bytes from a strip to the next.
  int64_t strip_stride() const { return steps_ * kStepBytes; }

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

  int64_t whole_steps(int64_t steps) const { return blocks_ ? ceil_div(steps, kTileSteps) * kTileSteps : steps; }

  void pack_x(int64_t first_strip, int64_t last_strip, int64_t first, int64_t last) const {
    for (int64_t i = first_strip; i < last_strip; ++i) {
      for (int64_t step = first; step < last; ++step) {
        uint8_t* const to = const_cast<uint8_t*>(strip(i, step));
        switch (factors_) {
          case Factors::int8:
            put_int8(x_, step, state_.columns, i * kStripColumns, kernels_.flip_x, to);
            break;
          case Factors::bfloat16:
            put_pairs(x_, x_type_, step, state_.columns, i * kStripColumns, reinterpret_cast<uint32_t*>(to));
            break;
          case Factors::float32:
            put_floats(x_, x_type_, step, state_.columns, i * kStripColumns, kStripColumns,
                       reinterpret_cast<float*>(to));
            break;
        }
      }
    }
  }

  // Of 64 columns of a step the tile takes the first 48.
  void pack_grad(int64_t first_tile, int64_t last_tile, int64_t first, int64_t last) const {
    alignas(64) uint32_t steps[kTileSteps][kStripColumns];
    for (int64_t tile = first_tile; tile < last_tile; ++tile) {
      const int64_t column = tile * kTileRows;
      for (int64_t step = first; step < last; ++step) {
        uint32_t* const columns = steps[step % kTileSteps];
        switch (factors_) {
          case Factors::int8:
            put_int8(grad_, step, state_.rows, column, 0, reinterpret_cast<uint8_t*>(columns));
            break;
          case Factors::bfloat16:
            put_pairs(grad_, grad_type_, step, state_.rows, column, columns);
            break;
          case Factors::float32:
            put_floats(grad_, grad_type_, step, state_.rows, column, kTileRows, reinterpret_cast<float*>(columns));
            break;
        }
        if (blocks_) {
          if ((step + 1) % kTileSteps == 0) {
            kernels_.transpose_steps(steps[0], const_cast<uint32_t*>(block(tile, step + 1 - kTileSteps)));
          }
          continue;
        }
        for (int64_t p = 0; p < kTilePanels; ++p) {
          put_panel_step(reinterpret_cast<const int8_t*>(columns + kPanelRows * p),
                         const_cast<int8_t*>(panel(tile, p, step)));
        }
      }
    }
  }

  void put_int8(const void* from, int64_t step, int64_t width, int64_t column, uint8_t flip, uint8_t* to) const {
    TokenRows<int8_t, 4> four;
    four.find(*this, from, step, width, column);
    kernels_.interleave(four.rows, flip, to);
  }

  void put_pairs(const void* from, Element type, int64_t step, int64_t width, int64_t column, uint32_t* to) const {
    if (type == Element::int8) {
      TokenRows<int8_t, 2> bytes;
      bytes.find(*this, from, step, width, column);
      kernels_.pair_int8(bytes.rows, to);
    } else {
      TokenRows<uint16_t, 2> words;
      words.find(*this, from, step, width, column);
      kernels_.pair_bfloat16(words.rows, to);
    }
  }

  // A step is a token; `room` elements are written.
  void put_floats(const void* from, Element type, int64_t step, int64_t width, int64_t column, int64_t room,
                  float* to) const {
    widen(from, type, step * width + column, std::min(room, width - column), room, to);
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

  const CastState& state_;
  const VoteKernels& kernels_;
  const Factors factors_;
  const Element grad_type_, x_type_;
  const void* const grad_;
  const void* const x_;
  const int64_t tokens_;
  const bool blocks_;
  const int64_t steps_, strips_, tiles_, panel_step_;
  Buffer packed_x_, packed_grad_, starts_;
};

}  // namespace

}  // namespace arb
