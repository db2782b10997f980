// Rows of votes in plain C++: the whole of `scalar`, and whatever another instruction set does not write by hand.
//
// Included by one translation unit for each instruction set; everything has internal linkage, so that the linker cannot
// hand code with wide registers to a processor that lacks them. For the same reason no function template of the
// standard library is used here.
#pragma once

#include <cmath>
#include <cstring>

#include "hash.h"
#include "votes.h"

namespace arb {
namespace {

constexpr float kLargestFloat = 3.402823466e38f;
constexpr int64_t kLanes = 16;

template <class T>
ARB_INLINE T clip(T value, T low, T high) {
  return value < low ? low : (value > high ? high : value);
}

ARB_INLINE uint32_t load32(const void* from) {
  uint32_t value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

ARB_INLINE void store32(void* to, uint32_t value) { std::memcpy(to, &value, sizeof value); }

// --- packing and products ----------------------------------------------------

inline void interleave_plain(const int8_t* const rows[4], uint8_t flip, uint8_t* step) {
  for (int64_t c = 0; c < kStripColumns; ++c) {
    for (int i = 0; i < 4; ++i) step[4 * c + i] = static_cast<uint8_t>(static_cast<uint8_t>(rows[i][c]) ^ flip);
  }
}

inline void sum_panel_plain(const int8_t* panel, int64_t steps, int32_t sums[kPanelRows]) {
  uint32_t total[kPanelRows] = {};
  for (int64_t s = 0; s < steps; ++s) {
    for (int64_t r = 0; r < kPanelRows; ++r) {
      for (int i = 0; i < 4; ++i) total[r] += static_cast<uint32_t>(static_cast<int32_t>(*panel++));
    }
  }
  for (int64_t r = 0; r < kPanelRows; ++r) sums[r] = static_cast<int32_t>(total[r]);
}

inline void multiply_int8_plain(const int8_t* panel, const uint8_t* strip, int64_t steps, const int32_t* start,
                                int32_t* c, int64_t ldc) {
  if (start != nullptr) {
    for (int64_t r = 0; r < kPanelRows; ++r) {
      for (int64_t k = 0; k < kStripColumns; ++k) c[r * ldc + k] = start[r];
    }
  }
  for (int64_t s = 0; s < steps; ++s, panel += 4 * kPanelRows, strip += kStepBytes) {
    for (int64_t r = 0; r < kPanelRows; ++r) {
      const int32_t g0 = panel[4 * r], g1 = panel[4 * r + 1], g2 = panel[4 * r + 2], g3 = panel[4 * r + 3];
      int32_t* row = c + r * ldc;
      for (int64_t k = 0; k < kStripColumns; ++k) {
        const uint8_t* x = strip + 4 * k;
        const int32_t sum = g0 * x[0] + g1 * x[1] + g2 * x[2] + g3 * x[3];
        row[k] = static_cast<int32_t>(static_cast<uint32_t>(row[k]) + static_cast<uint32_t>(sum));
      }
    }
  }
}

inline void multiply_float_plain(const float* panel, const float* strip, int64_t steps, bool fresh, float* c,
                                 int64_t ldc) {
  if (fresh) {
    for (int64_t r = 0; r < kPanelRows; ++r) {
      for (int64_t k = 0; k < kStripColumns; ++k) c[r * ldc + k] = 0.0f;
    }
  }
  for (int64_t s = 0; s < steps; ++s, panel += kPanelRows, strip += kStripColumns) {
    for (int64_t r = 0; r < kPanelRows; ++r) {
      for (int64_t k = 0; k < kStripColumns; ++k) c[r * ldc + k] += panel[r] * strip[k];
    }
  }
}

// --- votes of a row ----------------------------------------------------------

// The sum of 16 lanes, halves first: the order that vector registers fold in.
inline float fold(float lanes[kLanes]) {
  for (int64_t half = kLanes / 2; half > 0; half /= 2) {
    for (int64_t i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

template <class T>
inline float magnitude_as_float(T g) {
  return static_cast<float>(g < 0 ? -g : g);
}

// Sums of squares in float32 by row and by column.
inline void add_squares(const float* g, int64_t columns, float* column_squares, RowSums& row) {
  float lanes[kLanes] = {};
  for (int64_t c = 0; c < columns; c += kLanes) {
    for (int64_t i = 0; i < kLanes; ++i) {
      const float square = g[c + i] * g[c + i];
      lanes[i] += square;
      column_squares[c + i] += square;
    }
  }
  row.squares = fold(lanes);
}

// A gradient in float32, finite: NaN becomes 0 and is counted, infinity the largest number.
inline void clean(const float* g, int64_t columns, float* out, RowSums& row) {
  int32_t nan = 0;
  for (int64_t c = 0; c < columns; ++c) {
    const bool good = g[c] == g[c];
    nan += !good;
    out[c] = clip(good ? g[c] : 0.0f, -kLargestFloat, kLargestFloat);
  }
  row.nan = nan;
}

inline void vote_by_factors(const float* g, int64_t columns, const TileRule& tile, const RowRule& rule, int8_t* v) {
  const float largest = static_cast<float>(tile.limit) / 256.0f;
  const float* factor = tile.column_factor;
  for (int64_t c = 0; c < columns; ++c) {
    const uint32_t h = hash_finish(rule.hash + static_cast<uint32_t>(c) * kHashStep);
    float p = (g[c] * rule.factor) * factor[c];
    p = p == p ? p : 0.0f;
    const float u = static_cast<float>(tile.noise_start + static_cast<int32_t>(h >> tile.noise_shift)) * 0x1p-24f;
    v[c] = static_cast<int8_t>(std::floor(clip(p, -largest, largest) + u));
  }
}

inline void plan_shifts(const TileRule& tile, int32_t row_shift, ShiftPlan& plan) {
  for (int64_t c = 0; c < kTileColumns; ++c) {
    // Those beyond the weight's columns have shifts of 0, which may lead anywhere.
    const int32_t right = clip(row_shift + tile.column_shift[c] - tile.power, 0, kMostPlannedShift);
    const int32_t up = right > 8 ? right - 8 : 0, down = right > 8 ? 0 : 8 - right;
    const int32_t high = (tile.limit << up) >> down;
    plan.right[c] = right;
    plan.high[c] = high;
    plan.low[c] = -high;
    plan.mask[c] = (1 << right) - 1;
  }
}

// The stochastic shift of one integer, in 64 bits.
inline int8_t shifted_vote(int64_t g, int64_t shift, int64_t limit, uint32_t hash) {
  if (shift >= 0) {
    const int64_t right = shift < 31 ? shift : 31;
    const int64_t bound = (limit << right) >> 8;
    const int64_t noise = hash & ((int64_t{1} << right) - 1);
    return static_cast<int8_t>((clip(g, -bound, bound) + noise) >> right);
  }
  // Beyond 128 every g is clipped anyway, so the shift of a small number decides.
  const int64_t bound = limit >> 8;
  const int64_t factor = int64_t{1} << (shift > -16 ? -shift : 16);
  return static_cast<int8_t>(clip(clip<int64_t>(g, -128, 128) * factor, -bound, bound));
}

template <class T>
inline void vote_by_shifts(const T* g, int64_t columns, const TileRule& tile, const RowRule& rule, int8_t* v) {
  for (int64_t c = 0; c < columns; ++c) {
    const uint32_t h = hash_finish(rule.hash + static_cast<uint32_t>(c) * kHashStep);
    const int64_t shift = int64_t{rule.shift} + tile.column_shift[c] - tile.power;
    v[c] = shifted_vote(g[c], shift, tile.limit, h);
  }
}

inline void vote_float(const void* from, int64_t columns, const TileRule& tile, const RowRule& rule, int8_t* v,
                       RowSums& row, const ColumnSums& column) {
  float g[kTileColumns];
  clean(static_cast<const float*>(from), columns, g, row);
  add_squares(g, columns, column.squares, row);
  row.integer_sizes = 0;
  row.sizes = 0.0f;
  if (tile.rule == VoteRule::sign) {
    for (int64_t c = 0; c < columns; ++c) v[c] = static_cast<int8_t>((g[c] > 0.0f) - (g[c] < 0.0f));
    return;
  }
  float lanes[kLanes] = {};
  float* sizes = static_cast<float*>(column.sizes);
  for (int64_t c = 0; c < columns; c += kLanes) {
    for (int64_t i = 0; i < kLanes; ++i) {
      const float size = std::fabs(g[c + i]);
      lanes[i] += size;
      sizes[c + i] += size;
    }
  }
  row.sizes = fold(lanes);
  vote_by_factors(g, columns, tile, rule, v);
}

template <class T, class Sum>
inline void vote_integer(const void* from, int64_t columns, const TileRule& tile, const RowRule& rule, int8_t* v,
                         RowSums& row, const ColumnSums& column) {
  const T* g = static_cast<const T*>(from);
  float wide[kTileColumns];
  for (int64_t c = 0; c < columns; ++c) wide[c] = static_cast<float>(g[c]);
  add_squares(wide, columns, column.squares, row);
  row.nan = 0;
  row.sizes = 0.0f;
  row.integer_sizes = 0;
  if (tile.rule == VoteRule::sign) {
    for (int64_t c = 0; c < columns; ++c) v[c] = static_cast<int8_t>((g[c] > 0) - (g[c] < 0));
    return;
  }
  Sum* sizes = static_cast<Sum*>(column.sizes);
  int64_t total = 0;
  for (int64_t c = 0; c < columns; ++c) {
    // -2**31 has a magnitude of 2**31 in the unsigned type.
    const Sum size = g[c] < 0 ? static_cast<Sum>(0) - static_cast<Sum>(g[c]) : static_cast<Sum>(g[c]);
    sizes[c] += size;
    total += static_cast<int64_t>(size);
  }
  row.integer_sizes = total;
  if (tile.rule == VoteRule::shifts) {
    vote_by_shifts(g, columns, tile, rule, v);
    return;
  }
  for (int64_t c = 0; c < columns; ++c) wide[c] *= tile.scale;
  vote_by_factors(wide, columns, tile, rule, v);
}

constexpr auto vote_int32_plain = vote_integer<int32_t, uint32_t>;
constexpr auto vote_int64_plain = vote_integer<int64_t, int64_t>;

// --- accumulators ------------------------------------------------------------

// Codes of up to 64 columns of a row, one a byte; those of columns beyond the last block are 1.
inline void open_codes(CodeRow codes, int64_t columns, uint8_t* out) {
  for (int64_t c = 0; c < 2 * kRun; c += kBlock) {
    const uint32_t word = c < columns ? load32(codes + 4 * c) : 0x55555555u;
    for (int p = 0; p < 4; ++p) store32(out + c + 4 * p, (word >> (2 * p)) & 0x03030303u);
  }
}

inline void close_codes(const uint8_t* from, int64_t columns, uint8_t* codes) {
  for (int64_t c = 0; c < columns && c < 2 * kRun; c += kBlock) {
    uint32_t word = 0;
    for (int p = 0; p < 4; ++p) word |= load32(from + c + 4 * p) << (2 * p);
    store32(codes + 4 * c, word);
  }
}

inline void cast_plain(const int8_t* v, int64_t columns, VoteRange range, int8_t* votes, CodeRow codes,
                       int32_t* score, int group_shift) {
  for (int64_t c = 0; c < columns; ++c) {
    votes[c] = static_cast<int8_t>(clip<int32_t>(votes[c] - v[c], range.low, range.high));
  }
  if (score == nullptr) return;
  for (int64_t start = 0; start < columns; start += 2 * kRun) {
    uint8_t t[2 * kRun];
    open_codes(codes + 4 * start, columns - start, t);
    for (int64_t run = start; run < start + 2 * kRun && run < columns; run += kRun) {
      int32_t sum = 0;
      for (int64_t i = 0; i < kRun; ++i) sum += v[run + i] * (t[run - start + i] - 1);
      score[(run / kRun) >> group_shift] += sum;
    }
  }
}

inline int64_t flip_run(int8_t* votes, int64_t columns, uint8_t* codes, const FlipRule& rule) {
  uint8_t t[2 * kRun];
  open_codes(codes, columns, t);
  const int32_t theta = rule.threshold;
  int64_t flips = 0;
  for (int64_t c = 0; c < columns; ++c) {
    const int32_t a = votes[c], before = t[c];
    const int32_t crossed = (a >= theta) - (a <= -theta);
    const int32_t after = clip<int32_t>(before + crossed, 0, 2);
    const int32_t moved = after - before;
    flips += moved != 0;
    t[c] = static_cast<uint8_t>(after);
    const int32_t kept = rule.carry ? (moved != 0 ? a - theta * crossed : crossed * (theta / 2)) : 0;
    votes[c] = static_cast<int8_t>(crossed != 0 ? kept : a);
  }
  if (flips != 0) close_codes(t, columns, codes);
  return flips;
}

inline int64_t flip_plain(int8_t* votes, int64_t columns, uint8_t* codes, const FlipRule& rule, uint32_t hash) {
  int64_t flips = 0;
  for (int64_t start = 0; start < columns; start += 2 * kRun) {
    const int64_t count = columns - start < 2 * kRun ? columns - start : 2 * kRun;
    int8_t* a = votes + start;
    int32_t crossed = 0;
    for (int64_t c = 0; c < count; ++c) crossed |= (a[c] >= rule.threshold) | (a[c] <= -rule.threshold);
    if (crossed != 0) flips += flip_run(a, count, codes + 4 * start, rule);
    if (rule.leak != 0) {
      for (int64_t c = 0; c < count; ++c) {
        const int32_t size = a[c] < 0 ? -a[c] : a[c];
        const int32_t left = size > rule.leak ? size - rule.leak : 0;
        a[c] = static_cast<int8_t>(a[c] < 0 ? -left : left);
      }
    }
    if (rule.decay != 0) {
      const uint32_t base = hash + static_cast<uint32_t>(start) * kHashStep;
      for (int64_t c = 0; c < count; ++c) {
        const uint32_t h = hash_finish(base + static_cast<uint32_t>(c) * kHashStep) & 0xFFFFu;
        const uint32_t size = static_cast<uint32_t>(a[c] < 0 ? -a[c] : a[c]);
        const int32_t left = static_cast<int32_t>(size - ((size * rule.decay + h) >> 16));
        a[c] = static_cast<int8_t>(a[c] < 0 ? -left : left);
      }
    }
  }
  return flips;
}

// --- exponents ---------------------------------------------------------------

inline void settle_plain(const int32_t* score, int64_t count, uint32_t hash, int shift, int8_t* votes) {
  const uint32_t mask = (1u << shift) - 1;
  for (int64_t j = 0; j < count; ++j) {
    const uint32_t noise = hash_finish(hash + static_cast<uint32_t>(j) * kHashStep) & mask;
    // Both parts on their own: the sum may need a 33rd bit. What exceeds the range is clipped before it is taken off.
    const uint32_t low = ((static_cast<uint32_t>(score[j]) & mask) + noise) >> shift;
    const int32_t moved = clip<int32_t>((score[j] >> shift) + static_cast<int32_t>(low), -256, 256);
    votes[j] = static_cast<int8_t>(clip<int32_t>(votes[j] - moved, -127, 127));
  }
}

template <bool same_origin>
inline int64_t move_exponents_from(int8_t* exponent, int8_t* votes, const int8_t* origin, int64_t count,
                                   const ExponentRule& rule) {
  int64_t moved = 0;
  for (int64_t start = 0; start < count; start += 64) {
    const int64_t stop = count - start < 64 ? count : start + 64;
    int32_t some = 0;
    for (int64_t i = start; i < stop; ++i) {
      const int32_t b = votes[i];
      const int32_t up = (b >= rule.threshold) - (b <= -rule.threshold);
      const int32_t centre = same_origin ? origin[0] : origin[i];
      const int32_t wanted = clip(clip(exponent[i] + up, centre - rule.band, centre + rule.band), -126, 127);
      some += wanted != exponent[i];
      exponent[i] = static_cast<int8_t>(wanted);
      const int32_t rest = b - rule.threshold * up;
      const int32_t size = rest < 0 ? -rest : rest;
      const int32_t left = size > rule.leak ? size - rule.leak : 0;
      votes[i] = static_cast<int8_t>(rest < 0 ? -left : left);
    }
    moved += some;
  }
  return moved;
}

inline int64_t move_exponents_plain(int8_t* exponent, int8_t* votes, const int8_t* origin, int64_t origin_stride,
                                    int64_t count, const ExponentRule& rule) {
  return origin_stride == 0 ? move_exponents_from<true>(exponent, votes, origin, count, rule)
                            : move_exponents_from<false>(exponent, votes, origin, count, rule);
}

}  // namespace
}  // namespace arb
