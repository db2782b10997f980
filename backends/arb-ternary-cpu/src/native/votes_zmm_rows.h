// Rows of votes with 512-bit registers. Sums are taken in the order of votes_rows.h.
#pragma once

#include <immintrin.h>

#include <type_traits>

#include "votes_rows.h"

namespace arb {
namespace {

// --- the counter hash --------------------------------------------------------

ARB_INLINE __m512i set1(uint32_t value) { return _mm512_set1_epi32(static_cast<int32_t>(value)); }

// 0, 1, .. 15 times `stride` times kHashStep.
ARB_INLINE __m512i hash_lanes(uint32_t stride) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return _mm512_mullo_epi32(lane, set1(stride * kHashStep));
}

// The finaliser but for its last line, x ^ (x >> 16).
ARB_INLINE __m512i hash_mix(__m512i x) {
  x = _mm512_mullo_epi32(_mm512_xor_si512(x, _mm512_srli_epi32(x, 16)), set1(kHashFirst));
  return _mm512_mullo_epi32(_mm512_xor_si512(x, _mm512_srli_epi32(x, 15)), set1(kHashSecond));
}

ARB_INLINE __m512i hash_bits(__m512i x) {
  x = hash_mix(x);
  return _mm512_xor_si512(x, _mm512_srli_epi32(x, 16));
}

// --- votes of a row ----------------------------------------------------------

// In the order of fold().
ARB_INLINE float fold_lanes(__m512 lanes) {
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(lanes), _mm512_extractf32x8_ps(lanes, 1));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

// Four vectors of numbers in -128..127 to 64 bytes.
ARB_INLINE __m512i narrow(const __m512i v[4]) {
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m512i packed = _mm512_packs_epi16(_mm512_packs_epi32(v[0], v[1]), _mm512_packs_epi32(v[2], v[3]));
  return _mm512_permutexvar_epi32(order, packed);
}

struct BySigns {
  BySigns(const TileRule&, const RowRule&) {}

  ARB_INLINE __m512i votes(__m512i g) const {
    return _mm512_max_epi32(_mm512_min_epi32(g, _mm512_set1_epi32(1)), _mm512_set1_epi32(-1));
  }

  ARB_INLINE __m512i votes(__m512 g) const {
    const __m512 zero = _mm512_setzero_ps();
    const __m512i up = _mm512_maskz_set1_epi32(_mm512_cmp_ps_mask(g, zero, _CMP_GT_OQ), 1);
    return _mm512_mask_set1_epi32(up, _mm512_cmp_ps_mask(g, zero, _CMP_LT_OQ), -1);
  }
};

// `plain`: no product is NaN, and noise has all its bits.
template <bool plain>
struct ByFactors {
  __m512 row, largest, smallest;
  __m512 unit = _mm512_set1_ps(0x1p-24f);
  __m512i noise_start;
  __m128i noise_shift;

  ByFactors(const TileRule& tile, const RowRule& rule)
      : row(_mm512_set1_ps(rule.factor)),
        largest(_mm512_set1_ps(static_cast<float>(tile.limit) / 256.0f)),
        smallest(_mm512_set1_ps(static_cast<float>(-tile.limit) / 256.0f)),
        noise_start(_mm512_set1_epi32(tile.noise_start)),
        noise_shift(_mm_cvtsi32_si128(tile.noise_shift)) {}

  ARB_INLINE __m512i votes(__m512 g, const float* factor, __m512i hash) const {
    const __m512 p = _mm512_mul_ps(_mm512_mul_ps(g, row), _mm512_loadu_ps(factor));
    // 24 bits times 2**-24 is exact, so that the fused sum is rounded as the sum alone would be.
    if constexpr (plain) return rounded(_mm512_min_ps(p, largest), _mm512_srli_epi32(hash, 8));
    const __mmask16 good = _mm512_cmp_ps_mask(p, p, _CMP_ORD_Q);
    return rounded(_mm512_maskz_min_ps(good, p, largest),
                   _mm512_add_epi32(_mm512_srl_epi32(hash, noise_shift), noise_start));
  }

 private:
  ARB_INLINE __m512i rounded(__m512 below, __m512i noise) const {
    const __m512 v = _mm512_fmadd_ps(_mm512_cvtepi32_ps(noise), unit, _mm512_max_ps(below, smallest));
    return _mm512_cvt_roundps_epi32(v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  }
};

struct ByShifts {
  __m512i row, largest, smallest;
  __m512i bound[2];

  ByShifts(const TileRule& tile, const RowRule& rule)
      : row(_mm512_set1_epi32(tile.wide_shifts ? 0 : rule.shift - tile.power)),
        largest(_mm512_set1_epi32(tile.limit >> 8)),
        smallest(_mm512_set1_epi32(-(tile.limit >> 8))) {
    bound[0] = _mm512_loadu_si512(tile.bound);
    bound[1] = _mm512_loadu_si512(tile.bound + 16);
  }

  ARB_INLINE __m512i votes(__m512i g, const int32_t* column, __m512i hash) const {
    const __m512i zero = _mm512_setzero_si512();
    const __m512i shift = _mm512_add_epi32(row, _mm512_loadu_si512(column));
    const __m512i right = _mm512_min_epi32(_mm512_max_epi32(shift, zero), _mm512_set1_epi32(31));
    const __m512i high = _mm512_permutex2var_epi32(bound[0], right, bound[1]);
    const __m512i held = _mm512_max_epi32(_mm512_min_epi32(g, high), _mm512_sub_epi32(zero, high));
    // (held + noise) >> right without a 33rd bit: the low parts are added as unsigned numbers.
    const __m512i mask = _mm512_sub_epi32(_mm512_sllv_epi32(_mm512_set1_epi32(1), right), _mm512_set1_epi32(1));
    const __m512i low = _mm512_add_epi32(_mm512_and_si512(held, mask), _mm512_and_si512(hash, mask));
    const __m512i v = _mm512_add_epi32(_mm512_srav_epi32(held, right), _mm512_srlv_epi32(low, right));
    const __mmask16 left = _mm512_cmplt_epi32_mask(shift, zero);
    if (__builtin_expect(left == 0, 1)) return v;
    const __m512i count = _mm512_min_epi32(_mm512_sub_epi32(zero, shift), _mm512_set1_epi32(16));
    const __m512i small = _mm512_max_epi32(_mm512_min_epi32(g, _mm512_set1_epi32(128)), _mm512_set1_epi32(-128));
    const __m512i shifted = _mm512_sllv_epi32(small, count);
    return _mm512_mask_max_epi32(v, left, _mm512_min_epi32(shifted, largest), smallest);
  }
};

// The same by a plan.
struct ByPlan {
  const ShiftPlan& plan;

  ByPlan(const TileRule&, const RowRule& rule) : plan(*rule.plan) {}

  ARB_INLINE __m512i votes(__m512i g, int64_t k, __m512i hash) const {
    const __m512i above = _mm512_max_epi32(g, _mm512_load_si512(plan.low + k));
    const __m512i held = _mm512_min_epi32(above, _mm512_load_si512(plan.high + k));
    const __m512i noise = _mm512_and_si512(hash, _mm512_load_si512(plan.mask + k));
    return _mm512_srav_epi32(_mm512_add_epi32(held, noise), _mm512_load_si512(plan.right + k));
  }
};

ARB_INLINE __m512i magnitude_bits(__m512 g) {
  return _mm512_and_si512(_mm512_castps_si512(g), _mm512_set1_epi32(0x7FFFFFFF));
}

// Of 64 numbers NaN becomes 0, infinity the largest number. Returns how many were NaN.
inline int64_t clean_512(__m512 g[4]) {
  int64_t nan = 0;
  for (int j = 0; j < 4; ++j) {
    const __mmask16 good = _mm512_cmp_ps_mask(g[j], g[j], _CMP_ORD_Q);
    nan += 16 - __builtin_popcount(good);
    const __m512 below = _mm512_maskz_min_ps(good, g[j], _mm512_set1_ps(kLargestFloat));
    g[j] = _mm512_max_ps(below, _mm512_set1_ps(-kLargestFloat));
  }
  return nan;
}

template <class Rule>
void vote_float_rows(const float* from, int64_t columns, const TileRule& tile, const RowRule& rule, int8_t* v,
                     RowSums& row, const ColumnSums& column) {
  constexpr bool signs = std::is_same_v<Rule, BySigns>;
  const __m512i infinite = _mm512_set1_epi32(0x7F800000);
  const Rule rounding(tile, rule);
  __m512i index = _mm512_add_epi32(hash_lanes(1), set1(rule.hash));
  float* column_sizes = static_cast<float*>(column.sizes);
  __m512 squares = _mm512_setzero_ps(), sizes = _mm512_setzero_ps();
  int64_t nan = 0;
  for (int64_t c = 0; c < columns; c += 64) {
    __m512 g[4];
    __m512i out[4];
    for (int j = 0; j < 4; ++j) g[j] = _mm512_loadu_ps(from + c + 16 * j);
    const __m512i most = _mm512_max_epi32(_mm512_max_epi32(magnitude_bits(g[0]), magnitude_bits(g[1])),
                                          _mm512_max_epi32(magnitude_bits(g[2]), magnitude_bits(g[3])));
    if (__builtin_expect(_mm512_cmpge_epi32_mask(most, infinite) != 0, 0)) nan += clean_512(g);
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const int64_t k = c + 16 * j;
      const __m512 square = _mm512_mul_ps(g[j], g[j]);
      squares = _mm512_add_ps(squares, square);
      _mm512_storeu_ps(column.squares + k, _mm512_add_ps(_mm512_loadu_ps(column.squares + k), square));
      if constexpr (signs) {
        out[j] = rounding.votes(g[j]);
      } else {
        const __m512 size = _mm512_castsi512_ps(magnitude_bits(g[j]));
        sizes = _mm512_add_ps(sizes, size);
        _mm512_storeu_ps(column_sizes + k, _mm512_add_ps(_mm512_loadu_ps(column_sizes + k), size));
        out[j] = rounding.votes(g[j], tile.column_factor + k, hash_bits(index));
        index = _mm512_add_epi32(index, set1(16 * kHashStep));
      }
    }
    _mm512_storeu_si512(v + c, narrow(out));
  }
  row = {fold_lanes(squares), signs ? 0.0f : fold_lanes(sizes), 0, nan};
}

// Sums of |g| over the columns of a row: 32 bits a lane where TileRule::small_sizes holds.
template <bool small>
struct SizesOfRow {
  __m512i low = _mm512_setzero_si512(), high = _mm512_setzero_si512();

  ARB_INLINE void add(__m512i size) {
    if constexpr (small) {
      low = _mm512_add_epi32(low, size);
    } else {
      low = _mm512_add_epi64(low, low_half(size));
      high = _mm512_add_epi64(high, _mm512_srli_epi64(size, 32));
    }
  }

  ARB_INLINE int64_t total() const {
    if constexpr (small) return _mm512_reduce_add_epi64(_mm512_add_epi64(low_half(low), _mm512_srli_epi64(low, 32)));
    return _mm512_reduce_add_epi64(_mm512_add_epi64(low, high));
  }

 private:
  static ARB_INLINE __m512i low_half(__m512i x) { return _mm512_and_si512(x, _mm512_set1_epi64(0xFFFFFFFF)); }
};

template <class Rule, bool small>
void vote_int32_rows(const int32_t* from, int64_t columns, const TileRule& tile, const RowRule& rule, int8_t* v,
                     RowSums& row, const ColumnSums& column) {
  constexpr bool signs = std::is_same_v<Rule, BySigns>;
  const Rule rounding(tile, rule);
  const __m512 scale = _mm512_set1_ps(tile.scale);
  __m512i index = _mm512_add_epi32(hash_lanes(1), set1(rule.hash));
  uint32_t* column_sizes = static_cast<uint32_t*>(column.sizes);
  __m512 squares = _mm512_setzero_ps();
  SizesOfRow<small> sizes;
  for (int64_t c = 0; c < columns; c += 64) {
    __m512i out[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const int64_t k = c + 16 * j;
      const __m512i g = _mm512_loadu_si512(from + k);
      const __m512 wide = _mm512_cvtepi32_ps(g);
      const __m512 square = _mm512_mul_ps(wide, wide);
      squares = _mm512_add_ps(squares, square);
      _mm512_storeu_ps(column.squares + k, _mm512_add_ps(_mm512_loadu_ps(column.squares + k), square));
      if constexpr (signs) {
        out[j] = rounding.votes(g);
      } else {
        const __m512i size = _mm512_abs_epi32(g);
        sizes.add(size);
        _mm512_storeu_si512(column_sizes + k, _mm512_add_epi32(_mm512_loadu_si512(column_sizes + k), size));
        const __m512i hash = hash_bits(index);
        index = _mm512_add_epi32(index, set1(16 * kHashStep));
        if constexpr (std::is_same_v<Rule, ByFactors<false>>) {
          out[j] = rounding.votes(_mm512_mul_ps(wide, scale), tile.column_factor + k, hash);
        } else if constexpr (std::is_same_v<Rule, ByPlan>) {
          out[j] = rounding.votes(g, k, hash);
        } else {
          out[j] = rounding.votes(g, tile.column_shift + k, hash);
        }
      }
    }
    _mm512_storeu_si512(v + c, narrow(out));
  }
  row = {fold_lanes(squares), 0.0f, sizes.total(), 0};
}

void vote_float_512(const void* g, int64_t columns, const TileRule& tile, const RowRule& rule, int8_t* v, RowSums& row,
                    const ColumnSums& column) {
  const float* from = static_cast<const float*>(g);
  if (tile.rule == VoteRule::sign) {
    vote_float_rows<BySigns>(from, columns, tile, rule, v, row, column);
  } else if (has_plain_factors(tile, rule)) {
    vote_float_rows<ByFactors<true>>(from, columns, tile, rule, v, row, column);
  } else {
    vote_float_rows<ByFactors<false>>(from, columns, tile, rule, v, row, column);
  }
}

void vote_int32_512(const void* g, int64_t columns, const TileRule& tile, const RowRule& rule, int8_t* v, RowSums& row,
                    const ColumnSums& column) {
  const int32_t* from = static_cast<const int32_t*>(g);
  if (tile.rule == VoteRule::sign) {
    vote_int32_rows<BySigns, true>(from, columns, tile, rule, v, row, column);
  } else if (tile.rule == VoteRule::factors) {
    vote_int32_rows<ByFactors<false>, false>(from, columns, tile, rule, v, row, column);
  } else if (tile.wide_shifts) {
    vote_int32_plain(g, columns, tile, rule, v, row, column);
  } else if (rule.plan != nullptr) {
    vote_int32_rows<ByPlan, true>(from, columns, tile, rule, v, row, column);
  } else {
    vote_int32_rows<ByShifts, false>(from, columns, tile, rule, v, row, column);
  }
}

}  // namespace
}  // namespace arb
