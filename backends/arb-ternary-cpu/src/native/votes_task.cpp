#include "votes_task.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "threads.h"
#include "votes_storage.h"

namespace arb {

namespace {

// Shifts up to this size add up in 32 bits.
constexpr int32_t kNarrowShift = 1 << 29;
// Columns that one task of the reduction takes.
constexpr int64_t kReduced = 1024;

VoteRange range_of(const CastState& state) {
  const int32_t largest = state.bits == 8 ? 127 : state.bits == 4 ? 7 : 1;
  return {state.bits == 8 && state.rule == VoteRule::sign ? -128 : -largest, largest};
}

int64_t rows_between_flushes(int64_t largest) {
  return std::max<int64_t>(1, INT64_C(0xFFFFFFFF) / std::max<int64_t>(1, largest));
}

bool is_wide(const int32_t* shifts, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    if (shifts[i] > kNarrowShift || shifts[i] < -kNarrowShift) return true;
  }
  return false;
}

int group_shift_of(int64_t group_size) {
  for (int shift = 0; kRun << shift <= kTileColumns; ++shift) {
    if (group_size == kRun << shift) return shift;
  }
  return -1;
}

CodeRow codes_of(const CastState& state, int64_t n, int64_t column) {
  return state.packed + code_offset(state.columns, n, column);
}

template <class T>
T clip(T value, T low, T high) {
  return std::min(std::max(value, low), high);
}

}  // namespace

Caster::Caster(const CastState& state, const VoteKernels& kernels, GradientType type, int64_t slots, int64_t tasks,
               int64_t largest)
    : state_(state),
      kernels_(kernels),
      type_(type),
      slots_(slots),
      tasks_(tasks),
      flush_every_(rows_between_flushes(largest)),
      range_(range_of(state)),
      scores_(state.exponent_votes != nullptr || state.correlation != nullptr),
      group_shift_(group_shift_of(state.group_size)),
      vote_noise_(state.words.use(kUseVoteRounding)),
      exponent_noise_(state.words.use(kUseExponentRounding)),
      column_scale_(state.padded_columns() * 4),
      column_squares_(tasks * state.padded_columns() * 4),
      column_sizes_(state.rule == VoteRule::sign ? 0 : tasks * state.padded_columns() * 8),
      row_totals_(slots * static_cast<int64_t>(sizeof(RowTotals))),
      row_scores_(scores_ ? slots * state.groups() * 4 : 0) {
  std::memset(row_totals_.as<void>(), 0, static_cast<size_t>(slots) * sizeof(RowTotals));
  if (scores_) std::memset(row_scores_.as<void>(), 0, static_cast<size_t>(slots * state.groups() * 4));
  rule_.rule = state.rule;
  rule_.limit = state.limit;
  rule_.noise_shift = 8 + state.noise_shift;
  rule_.noise_start = ((1 << 24) - (1 << (24 - state.noise_shift))) >> 1;
  rule_.small_sizes = largest <= INT64_C(0xFFFFFFFF) / (kTileColumns / 8);
  for (int s = 0; s < 32; ++s) {
    rule_.bound[s] = static_cast<int32_t>(std::min<int64_t>((int64_t{state.limit} << s) >> 8, INT32_MAX));
  }
  if (state.scale != nullptr) {
    square_ = *state.scale * *state.scale;
    rule_.scale = *state.scale;
    std::frexp(*state.scale, &rule_.power);
    rule_.power -= 1;
  }
  if (state.rule == VoteRule::sign) return;
  const int32_t* column = static_cast<const int32_t*>(state.vote_scale) + state.rows;
  int32_t* padded = column_scale_.as<int32_t>();
  std::memcpy(padded, column, static_cast<size_t>(state.columns) * 4);
  std::fill(padded + state.columns, padded + state.padded_columns(), 0);
  if (state.rule == VoteRule::factors) {
    const float* factors = column_scale_.as<float>();
    rule_.finite_factors = std::all_of(factors, factors + state.columns, [](float f) { return std::isfinite(f); });
    rule_.no_zero_factors = std::all_of(factors, factors + state.columns, [](float f) { return f != 0.0f; });
  }
  if (state.rule == VoteRule::shifts) {
    rule_.wide_shifts = is_wide(static_cast<const int32_t*>(state.vote_scale), state.rows + state.columns);
    const auto ends = std::minmax_element(column, column + state.columns);
    rule_.least_shift = *ends.first;
    rule_.most_shift = *ends.second;
  }
}

void Caster::begin(Tile& tile, int64_t task, int64_t start) const {
  tile.task = task;
  tile.start = start;
  tile.columns = std::min(kTileColumns, state_.columns - start);
  tile.rule = rule_;
  tile.rule.column_factor = column_scale_.as<float>() + start;
  tile.rule.column_shift = column_scale_.as<int32_t>() + start;
  tile.squares = column_squares_.as<float>() + task * state_.padded_columns() + start;
  tile.pending = 0;
  tile.flushed = false;
  std::fill(tile.planned, tile.planned + kPlans, false);
  std::memset(tile.squares, 0, kTileColumns * sizeof *tile.squares);
  std::memset(tile.sizes, 0, kTileColumns * (type_ == GradientType::int64 ? 8 : 4));
}

void Caster::prefetch(int64_t start, int64_t n, bool codes) const {
  const int64_t columns = std::min(kTileColumns, state_.columns - start);
  const uint8_t* row = state_.votes + n * vote_row_bytes(state_.columns, state_.bits);
  const int64_t first = start * state_.bits / 8, last = (start + columns) * state_.bits / 8;
  for (int64_t byte = first; byte < last; byte += 64) __builtin_prefetch(row + byte, 1);
  if (!scores_ || (!codes && n % kBlock != 0)) return;
  const uint8_t* from = codes_of(state_, n, start);
  for (int64_t byte = 0; byte < columns * 4; byte += 64) __builtin_prefetch(from + byte);
}

const ShiftPlan* Caster::plan(Tile& tile, int32_t row_shift) const {
  if (type_ != GradientType::int32 || !can_plan(tile.rule, row_shift)) return nullptr;
  const uint32_t place = static_cast<uint32_t>(row_shift) % kPlans;
  if (!tile.planned[place] || tile.planned_shift[place] != row_shift) {
    kernels_.plan(tile.rule, row_shift, tile.plans[place]);
    tile.planned[place] = true;
    tile.planned_shift[place] = row_shift;
  }
  return tile.plans + place;
}

void Caster::vote(Tile& tile, int64_t n, const void* g, int8_t* v, RowSums& sums,
                  const ColumnSums& column) const {
  RowRule row;
  if (state_.rule == VoteRule::factors) row.factor = static_cast<const float*>(state_.vote_scale)[n];
  if (state_.rule == VoteRule::shifts) {
    row.shift = static_cast<const int32_t*>(state_.vote_scale)[n];
    row.plan = plan(tile, row.shift);
  }
  const auto kernel = kernels_.vote[static_cast<int>(type_)];
  if (state_.rule == VoteRule::sign) {
    kernel(g, tile.whole_columns(), tile.rule, row, v, sums, column);
    return;
  }
  const uint64_t index =
      static_cast<uint64_t>(n) * static_cast<uint64_t>(state_.columns) + static_cast<uint64_t>(tile.start);
  const uint64_t next_key = ((index >> 32) + 1) << 32;
  row.hash = vote_noise_.base(index);
  kernel(g, tile.whole_columns(), tile.rule, row, v, sums, column);
  const int64_t same_key = static_cast<int64_t>(next_key - index);
  if (same_key >= tile.columns) return;
  // Columns from `same_key` on have another key: their votes are made once more, the sums thrown away.
  alignas(64) int8_t other[kTileColumns];
  float squares[kTileColumns] = {};
  int64_t sizes[kTileColumns] = {};
  RowSums ignored;
  row.hash = vote_noise_.base(next_key) - static_cast<uint32_t>(same_key) * kHashStep;
  kernel(g, tile.whole_columns(), tile.rule, row, other, ignored, {squares, sizes});
  std::memcpy(v + same_key, other + same_key, static_cast<size_t>(tile.columns - same_key));
}

void Caster::cast(Tile& tile, int64_t slot, int64_t n, const void* g) const {
  alignas(64) int8_t v[kTileColumns];
  RowSums sums;
  vote(tile, n, g, v, sums, {tile.squares, tile.sizes});
  RowTotals& totals = row_totals_.as<RowTotals>()[slot];
  totals.squares += static_cast<double>(sums.squares);
  totals.sizes += static_cast<double>(sums.sizes);
  totals.integer_sizes += sums.integer_sizes;
  totals.nan += sums.nan;
  if (type_ == GradientType::int32 && ++tile.pending == flush_every_) flush(tile);

  uint8_t* row = state_.votes + n * vote_row_bytes(state_.columns, state_.bits);
  if (state_.bits == 8) {
    score(tile, slot, n, v, reinterpret_cast<int8_t*>(row) + tile.start);
    return;
  }
  alignas(64) int8_t open[kTileColumns + kVoteBlock];
  open_votes(row, state_.bits, tile.start, tile.columns, open);
  score(tile, slot, n, v, open);
  close_votes(open, state_.bits, tile.start, tile.columns, row);
}

void Caster::score(const Tile& tile, int64_t slot, int64_t n, const int8_t* v, int8_t* votes) const {
  const CodeRow codes = codes_of(state_, n, tile.start);
  if (!scores_) {
    kernels_.cast(v, tile.columns, range_, votes, codes, nullptr, 0);
    return;
  }
  const int64_t size = state_.group_size, groups = state_.groups();
  int32_t* scores = row_scores_.as<int32_t>() + slot * groups;
  if (group_shift_ >= 0) {
    kernels_.cast(v, tile.columns, range_, votes, codes, scores + tile.start / size, group_shift_);
    return;
  }
  if (size % kRun == 0 || groups == 1) {
    int32_t by_run[kTileColumns / kRun] = {};
    kernels_.cast(v, tile.columns, range_, votes, codes, by_run, 0);
    const int64_t runs = ceil_div(tile.columns, kRun);
    for (int64_t i = 0; i < runs; ++i) scores[(tile.start + i * kRun) / size] += by_run[i];
    return;
  }
  kernels_.cast(v, tile.columns, range_, votes, codes, nullptr, 0);
  for (int64_t c = 0; c < tile.columns; ++c) {
    const uint8_t byte = codes[c / kBlock * 4 * kBlock + c % 4];
    const int t = ((byte >> (c % kBlock / 4 * 2)) & 3) - 1;
    scores[(tile.start + c) / size] += v[c] * t;
  }
}

void Caster::settle(int64_t n, const int32_t* scores) const {
  const int64_t count = state_.groups(), first = n * count;
  if (state_.correlation != nullptr) {
    for (int64_t j = 0; j < count; ++j) {
      int16_t& correlation = state_.correlation[first + j];
      correlation = static_cast<int16_t>(clip<int32_t>(correlation + scores[j], INT16_MIN, INT16_MAX));
      int32_t& steps = state_.steps[first + j];
      if (steps != INT32_MAX) ++steps;
    }
  }
  if (state_.exponent_votes == nullptr) return;
  int8_t* votes = state_.exponent_votes + first;
  if (state_.rule == VoteRule::sign) {
    for (int64_t j = 0; j < count; ++j) {
      const int32_t sign = (scores[j] > 0) - (scores[j] < 0);
      votes[j] = static_cast<int8_t>(clip<int32_t>(votes[j] - sign, -128, 127));
    }
    return;
  }
  // The key of the hash changes at multiples of 2**32.
  const uint64_t index = static_cast<uint64_t>(first);
  const uint64_t left = (((index >> 32) + 1) << 32) - index;
  const int64_t same_key = static_cast<int64_t>(std::min(left, static_cast<uint64_t>(count)));
  kernels_.settle(scores, same_key, exponent_noise_.base(index), state_.exponent_shift, votes);
  if (same_key == count) return;
  kernels_.settle(scores + same_key, count - same_key, exponent_noise_.base(index + static_cast<uint64_t>(same_key)),
                  state_.exponent_shift, votes + same_key);
}

void Caster::flush(Tile& tile) const {
  uint32_t sizes[kTileColumns];
  std::memcpy(sizes, tile.sizes, sizeof sizes);
  for (int64_t c = 0; c < kTileColumns; ++c) tile.totals[c] = sizes[c] + (tile.flushed ? tile.totals[c] : 0);
  tile.flushed = true;
  std::memset(tile.sizes, 0, sizeof sizes);
  tile.pending = 0;
}

void Caster::end(Tile& tile) const {
  if (state_.rule == VoteRule::sign) return;
  const int64_t offset = tile.task * state_.padded_columns() + tile.start;
  if (type_ == GradientType::float32) {
    double* sizes = column_sizes_.as<double>() + offset;
    float from[kTileColumns];
    std::memcpy(from, tile.sizes, sizeof from);
    for (int64_t c = 0; c < kTileColumns; ++c) sizes[c] = static_cast<double>(from[c]);
    return;
  }
  if (type_ == GradientType::int32) flush(tile);
  const void* totals = type_ == GradientType::int32 ? static_cast<const void*>(tile.totals) : tile.sizes;
  std::memcpy(column_sizes_.as<int64_t>() + offset, totals, sizeof tile.totals);
}

// Sums of |g|: of integers rounded once to float32, then times the scale.
float Caster::in_units(double sizes, int64_t integer_sizes) const {
  const float sum = type_ == GradientType::float32 ? static_cast<float>(sizes) : static_cast<float>(integer_sizes);
  return state_.scale == nullptr ? sum : sum * *state_.scale;
}

void Caster::end_row(int64_t slot, int64_t n) const {
  const RowTotals& totals = row_totals_.as<RowTotals>()[slot];
  state_.stats[1 + n] += static_cast<float>(totals.squares) * square_;
  if (state_.rule != VoteRule::sign) state_.magnitudes[n] += in_units(totals.sizes, totals.integer_sizes);
  if (scores_) settle(n, row_scores_.as<int32_t>() + slot * state_.groups());
}

void Caster::reduce_columns(int64_t first, int64_t last) const {
  const int64_t width = state_.padded_columns();
  double squares[kReduced] = {}, sizes[kReduced] = {};
  int64_t integer_sizes[kReduced] = {};
  const int64_t count = last - first;
  for (int64_t task = 0; task < tasks_; ++task) {
    const int64_t offset = task * width + first;
    const float* task_squares = column_squares_.as<float>() + offset;
    for (int64_t c = 0; c < count; ++c) squares[c] += static_cast<double>(task_squares[c]);
    if (state_.rule == VoteRule::sign) continue;
    if (type_ == GradientType::float32) {
      const double* task_sizes = column_sizes_.as<double>() + offset;
      for (int64_t c = 0; c < count; ++c) sizes[c] += task_sizes[c];
    } else {
      const int64_t* task_sizes = column_sizes_.as<int64_t>() + offset;
      for (int64_t c = 0; c < count; ++c) integer_sizes[c] += task_sizes[c];
    }
  }
  float* column_stats = state_.stats + 1 + state_.rows + first;
  for (int64_t c = 0; c < count; ++c) column_stats[c] += static_cast<float>(squares[c]) * square_;
  if (state_.rule == VoteRule::sign) return;
  float* column_magnitudes = state_.magnitudes + state_.rows + first;
  for (int64_t c = 0; c < count; ++c) column_magnitudes[c] += in_units(sizes[c], integer_sizes[c]);
}

void Caster::finish(int threads) const {
  auto reduce = [this](int64_t i, int) { reduce_columns(i * kReduced, std::min((i + 1) * kReduced, state_.columns)); };
  parallel_tasks(ceil_div(state_.columns, kReduced), threads, reduce);
  int64_t nan = 0;
  for (int64_t slot = 0; slot < slots_; ++slot) nan += row_totals_.as<RowTotals>()[slot].nan;
  if (nan != 0) state_.stats[0] += static_cast<float>(nan);
}

}  // namespace arb
