// Casting the votes of gradient rows: arguments of the cast kernels, and what their drivers share.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <new>

#include "hash.h"
#include "votes.h"

namespace arb {

// Types of the tensors that a cast kernel is given.
enum class Element : int { float32 = 0, bfloat16 = 1, int8 = 2 };

// The weight, its accumulators and the rule; all addresses are of contiguous tensors that the caller has checked.
struct CastState {
  int64_t rows = 0;        // N
  int64_t columns = 0;     // K
  int64_t group_size = 1;  // G
  int bits = 8;            // of an accumulator
  const uint8_t* packed = nullptr;
  uint8_t* votes = nullptr;
  int8_t* exponent_votes = nullptr;  // [N, J], or null
  int16_t* correlation = nullptr;    // [N, J], or null; with `steps`
  int32_t* steps = nullptr;
  float* stats = nullptr;            // [1 + N + K]
  float* magnitudes = nullptr;       // [N + K]; null under sign votes
  const float* scale = nullptr;      // of an integer gradient, or null
  const void* vote_scale = nullptr;  // [N + K]: float factors or int32 shifts; null under sign votes
  VoteRule rule = VoteRule::sign;
  int32_t limit = 0;
  int32_t exponent_shift = 0;
  int32_t noise_shift = 0;           // under the rule `factors`
  HashWords words = {0, 0, 0};

  int64_t groups() const { return ceil_div(columns, group_size); }
  int64_t padded_columns() const { return ceil_div(columns, kTileColumns) * kTileColumns; }
};

// Uninitialised memory, aligned for vectors and a cache line longer than asked for; freed at the end of the scope.
class Buffer {
 public:
  explicit Buffer(int64_t bytes) : data_(std::aligned_alloc(64, static_cast<size_t>((bytes + 127) / 64 * 64))) {
    if (data_ == nullptr) throw std::bad_alloc();
  }
  ~Buffer() { std::free(data_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  void* data_;
};

// Turns gradient rows, a column tile at a time, into votes and sums.
//
// Rows are counted by slots: the row of a linear's gradient, the place of a distinct id in a lookup. Tasks own disjoint
// slots; the sums over rows are taken within a task row by row, then over the tasks in their order.
class Caster {
 public:
  // `largest` bounds the magnitude of an int32 gradient.
  Caster(const CastState& state, const VoteKernels& kernels, GradientType type, int64_t slots, int64_t tasks,
         int64_t largest);

  // Plans that are kept: rows differ by a few shifts.
  static constexpr int kPlans = 4;

  // A column tile in a task, and its sums over the task's rows.
  struct Tile {
    int64_t task;
    int64_t start;    // first column
    int64_t columns;  // those of the weight
    TileRule rule;
    float* squares;   // kTileColumns of them, the task's
    int64_t pending;  // rows in `sizes` of an int32 gradient
    bool flushed;     // whether `totals` of an int32 gradient hold anything
    bool planned[kPlans];
    int32_t planned_shift[kPlans];
    ShiftPlan plans[kPlans];
    alignas(64) unsigned char sizes[8 * kTileColumns];  // float, uint32 or int64
    int64_t totals[kTileColumns];

    int64_t whole_columns() const { return ceil_div(columns, kStripColumns) * kStripColumns; }
  };

  void begin(Tile& tile, int64_t task, int64_t start) const;
  // Fetches what casting a row of the tile that begins at a column will read from memory; codes with the first row of a
  // block, or if `codes`.
  void prefetch(int64_t start, int64_t n, bool codes) const;
  // `g`: whole_columns() elements of the tile's gradient row; those beyond the weight's are 0.
  void cast(Tile& tile, int64_t slot, int64_t n, const void* g) const;
  void end(Tile& tile) const;
  // After all column tiles of a row.
  void end_row(int64_t slot, int64_t n) const;
  // After all tasks.
  void finish(int threads) const;

 private:
  struct RowTotals {
    double squares;
    double sizes;
    int64_t integer_sizes;
    int64_t nan;
  };

  void vote(Tile& tile, int64_t n, const void* g, int8_t* v, RowSums& sums, const ColumnSums& column) const;
  const ShiftPlan* plan(Tile& tile, int32_t row_shift) const;
  void score(const Tile& tile, int64_t slot, int64_t n, const int8_t* v, int8_t* votes) const;
  void settle(int64_t n, const int32_t* scores) const;
  void flush(Tile& tile) const;
  void reduce_columns(int64_t first, int64_t last) const;
  float in_units(double sizes, int64_t integer_sizes) const;

  const CastState& state_;
  const VoteKernels& kernels_;
  const GradientType type_;
  const int64_t slots_;
  const int64_t tasks_;
  const int64_t flush_every_;
  const VoteRange range_;
  const bool scores_;         // whether anything learns from the scores of groups
  const int group_shift_;     // groups are 1 << group_shift_ runs of which none crosses the edge of a tile; or -1
  HashStream vote_noise_, exponent_noise_;
  TileRule rule_;
  float square_ = 1.0f;
  Buffer column_scale_;    // [padded K]
  Buffer column_squares_;  // float [tasks, padded K]
  Buffer column_sizes_;    // double or int64 [tasks, padded K]
  Buffer row_totals_;      // [slots]
  Buffer row_scores_;      // int32 [slots, J]
};

}  // namespace arb
