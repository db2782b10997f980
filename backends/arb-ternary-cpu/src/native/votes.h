// Votes: what one row of a tile of the gradient does to accumulators and sums, for one instruction set.
//
// The drivers (votes_cast.cpp, votes_lookup.cpp, votes_apply.cpp) cut the work into tasks and tiles by the sizes alone;
// the inner loops come in a table for each instruction set. Sums of floats are taken in an order that the sizes fix, so
// results do not depend on the number of threads.
#pragma once

#include <cstddef>
#include <cstdint>

#include "isa.h"

// For the small functions of inner loops, where the compiler would rather save code than a call.
#if defined(__GNUC__)
#define ARB_INLINE inline __attribute__((always_inline))
#else
#define ARB_INLINE inline
#endif

namespace arb {

// Blocks of packed weights: 16 rows x 16 columns in 64 bytes.
constexpr int64_t kBlock = 16;
// Rows of the gradient that a micro-kernel makes at a time, and columns of a strip of packed activations.
constexpr int64_t kPanelRows = 6;
constexpr int64_t kStripColumns = 64;
// Steps of the inner dimension (a float, two bfloat16, or four int8) after which a micro-kernel goes on to the next
// panel. The packed activations of so many, 128 KiB, stay in the second-level cache while all panels of a tile pass;
// shorter stretches, for the first-level cache, would load and store the sums more often and are slower.
constexpr int64_t kDepth = 512;
constexpr int64_t kStepBytes = 4 * kStripColumns;
// A tile of the gradient, 96 KiB: rows of whole panels, columns of whole blocks of narrow votes. It is wide so that
// the votes of a row, which lie apart from those of the next, are read many cache lines at a time.
constexpr int64_t kTileRows = 48;
constexpr int64_t kTileColumns = 512;
// Numbers from a row of the tile to the next: not a power of two, whose rows would share a few sets of the caches.
constexpr int64_t kTilePitch = kTileColumns + 16;
// Where products are made of square registers, steps that one holds.
constexpr int64_t kTileSteps = 16;
// Columns whose products of votes and trits are summed together: the smallest group.
constexpr int64_t kRun = 32;

static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

enum class VoteRule : int { sign = 0, factors = 1, shifts = 2 };

// What the rule of votes knows about all rows of a tile. Arrays hold kTileColumns columns; those beyond the weight's
// are 0.
struct TileRule {
  VoteRule rule = VoteRule::sign;
  const float* column_factor = nullptr;
  const int32_t* column_shift = nullptr;
  float scale = 1.0f;        // of an integer gradient under the rule `factors`
  int32_t power = 0;         // and its exponent under the rule `shifts`
  int32_t limit = 0;         // largest vote in 256ths
  int32_t noise_shift = 8;   // bits of the hash that the noise of `factors` does not have
  int32_t noise_start = 0;   // least noise in 2**-24
  bool finite_factors = false;  // of all columns
  bool no_zero_factors = false;
  int32_t bound[32] = {};    // by shift to the right: min((limit << shift) >> 8, 2**31 - 1)
  bool wide_shifts = false;  // row plus column shifts may leave 32 bits
  int32_t least_shift = 0;   // of all columns
  int32_t most_shift = 0;
  bool small_sizes = false;  // of an int32 gradient: |g| of kTileColumns / 8 columns sum to less than 2**32
};

// Shifts to the right up to which g + noise, g clipped, needs no more than 32 bits for any limit.
constexpr int32_t kMostPlannedShift = 24;

// What shifts by up to kMostPlannedShift bits to the right make of the columns of a tile, for rows of one shift: noise
// is taken of hashes by `mask` and added to what is held between `low` and `high`, before the shift.
struct ShiftPlan {
  alignas(64) int32_t right[kTileColumns];
  alignas(64) int32_t high[kTileColumns];
  alignas(64) int32_t low[kTileColumns];
  alignas(64) int32_t mask[kTileColumns];
};

// And about one row.
struct RowRule {
  float factor = 0.0f;
  int32_t shift = 0;
  const ShiftPlan* plan = nullptr;  // where there is one, small_sizes holds
  uint32_t hash = 0;  // of the row's first column in the tile, see HashStream
};

// Whether a plan holds for a row of this shift.
static inline bool can_plan(const TileRule& tile, int32_t row_shift) {
  if (tile.wide_shifts || !tile.small_sizes) return false;
  const int32_t shift = row_shift - tile.power;
  return shift + tile.least_shift >= 0 && shift + tile.most_shift <= kMostPlannedShift;
}

// Whether no product of a finite gradient and the factors is NaN, as infinity times 0 is, and noise has all its bits.
static inline bool has_plain_factors(const TileRule& tile, const RowRule& row) {
  const float size = row.factor < 0.0f ? -row.factor : row.factor;
  return tile.noise_shift == 8 && tile.finite_factors && size <= (tile.no_zero_factors ? 3.402823466e38f : 1.0f);
}

// Sums over the columns of a row; those of integers are exact.
struct RowSums {
  float squares;
  float sizes;
  int64_t integer_sizes;
  int64_t nan;
};

// Sums over the rows of a task for each column of a tile; the rows are added one after another. Sizes: float, or
// uint32 of an int32 gradient, or int64 of an int64 one.
struct ColumnSums {
  float* squares;
  void* sizes;
};

enum class GradientType : int { float32 = 0, int32 = 1, int64 = 2 };
constexpr int kGradientTypes = 3;

// A row of packed codes: the dword of a row in its first block, and dwords of the same row 64 bytes apart.
using CodeRow = const uint8_t*;

// Where in the packed weight the codes of a row begin at a column, the first of a block.
static inline int64_t code_offset(int64_t columns, int64_t n, int64_t column) {
  return ((n / kBlock) * ceil_div(columns, kBlock) + column / kBlock) * 4 * kBlock + (n % kBlock) * 4;
}

struct FlipRule {
  int32_t threshold = 1;
  int32_t leak = 0;
  uint32_t decay = 0;  // in 65536ths
  bool carry = false;
};

struct ExponentRule {
  int32_t threshold = 1;
  int32_t band = 0;
  int32_t leak = 0;
};

// Votes of int8 that are held in rows: low and high are where they saturate.
struct VoteRange {
  int32_t low;
  int32_t high;
};

struct VoteKernels {
  // What the bits of packed int8 activations are flipped by, and so the bias that the products have: 0x80 and 128 where
  // one operand has to be unsigned, or 0.
  uint8_t flip_x;
  // c[6][ldc] += a panel of an int8 gradient times a strip of activations, both packed; 64 columns. Unless `start` is
  // null the sums start from its numbers, one a row, and not from c.
  void (*multiply_int8)(const int8_t* panel, const uint8_t* strip, int64_t steps, const int32_t* start, int32_t* c,
                        int64_t ldc);
  // The same for floats; the sums start from 0 if `fresh`.
  void (*multiply_float)(const float* panel, const float* strip, int64_t steps, bool fresh, float* c, int64_t ldc);
  // Four rows of 64 int8 each to a step: byte 4 c + i is rows[i][c], its bits flipped by `flip`.
  void (*interleave)(const int8_t* const rows[4], uint8_t flip, uint8_t* step);
  // Sums of the elements of each row of a panel.
  void (*sum_panel)(const int8_t* panel, int64_t steps, int32_t sums[kPanelRows]);
  // Bytes of a step of a panel of an int8 gradient: 24, or 48 where the multiplication is one of 16-bit pairs.
  int64_t panel_step;
  // Shifts of a tile's columns for rows of a shift, see can_plan().
  void (*plan)(const TileRule& tile, int32_t row_shift, ShiftPlan& plan);
  // Votes v of one row of a tile, `columns` of it (a multiple of 64), and its sums. NaN is replaced in the sums only.
  void (*vote[kGradientTypes])(const void* g, int64_t columns, const TileRule& tile, const RowRule& row, int8_t* v,
                               RowSums& row_sums, const ColumnSums& column_sums);
  // votes = clip(votes - v), `columns` of them; then, unless score is null, sums of v * T of every 32 columns are added
  // to the scores of their groups: score[i >> group_shift] for the i-th such run.
  void (*cast)(const int8_t* v, int64_t columns, VoteRange range, int8_t* votes, CodeRow codes, int32_t* score,
               int group_shift);
  // Flips, leak and decay of `columns` votes of a row; `hash` is that of the first, see HashStream. Returns the trits
  // that moved.
  int64_t (*flip)(int8_t* votes, int64_t columns, uint8_t* codes, const FlipRule& rule, uint32_t hash);
  // Votes of `count` groups: votes = clip(votes - ((score + noise) >> shift), -127, 127), the noise being the low bits
  // of the hashes that begin with `hash`.
  void (*settle)(const int32_t* score, int64_t count, uint32_t hash, int shift, int8_t* votes);
  // Moves `count` exponents; `origin` advances by `origin_stride` of 0 or 1. Returns how many moved.
  int64_t (*move_exponents)(int8_t* exponent, int8_t* votes, const int8_t* origin, int64_t origin_stride, int64_t count,
                            const ExponentRule& rule);
  // multiply_float for a step of two tokens in bfloat16, subnormal ones counted as 0; null where there is no such
  // product.
  void (*multiply_pairs)(const uint32_t* panel, const uint32_t* strip, int64_t steps, bool fresh, float* c,
                         int64_t ldc) = nullptr;
  // Two rows of 64 elements to such a step: word c is rows[0][c] and, above it, rows[1][c], as bfloat16.
  void (*pair_int8)(const int8_t* const rows[2], uint32_t* step) = nullptr;
  void (*pair_bfloat16)(const uint16_t* const rows[2], uint32_t* step) = nullptr;
  // Where products are made of square registers, else null. kTileSteps steps of 64 columns of the gradient, as
  // interleave() or pair_bfloat16() made them, to kTileRows / 16 blocks of 16 rows x kTileSteps steps.
  void (*transpose_steps)(const uint32_t* steps, uint32_t* blocks) = nullptr;
  // The first `rows` rows of a tile, c[kTileRows][kTilePitch] = such blocks times strips that are `stride` bytes apart.
  // Columns are whole strips, steps a multiple of kTileSteps. The products of int8 are int32, those of bfloat16
  // float32.
  void (*multiply_tile_int8)(const uint32_t* blocks, int64_t rows, const uint8_t* strips, int64_t stride,
                             int64_t columns, int64_t steps, void* c) = nullptr;
  void (*multiply_tile_pairs)(const uint32_t* blocks, int64_t rows, const uint8_t* strips, int64_t stride,
                              int64_t columns, int64_t steps, void* c) = nullptr;
};

const VoteKernels& vote_kernels_scalar();
#if defined(ARB_HAVE_AVX2)
const VoteKernels& vote_kernels_avx2();
#endif
#if defined(ARB_HAVE_AVXVNNI)
const VoteKernels& vote_kernels_avxvnni();
#endif
#if defined(ARB_HAVE_AVX512VNNI)
const VoteKernels& vote_kernels_avx512vnni();
#endif
#if defined(ARB_HAVE_AVX512BF16)
const VoteKernels& vote_kernels_avx512bf16();
#endif
#if defined(ARB_HAVE_AMX)
const VoteKernels& vote_kernels_amx();
#endif
#if defined(ARB_HAVE_NEON)
const VoteKernels& vote_kernels_neon();
#endif

// The table of an instruction set; that of `scalar` where it was not compiled in.
const VoteKernels& vote_kernels(Isa isa);

}  // namespace arb
