// Rows of votes with 256-bit registers, for `avx2` and `avxvnni`. Sums are taken in the order of votes_rows.h.
#pragma once

#include <type_traits>

#include "votes_ymm.h"

namespace arb {
namespace {

constexpr int64_t kYmmVotes = 32;

ARB_INLINE __m256i set1_ymm(uint32_t value) { return _mm256_set1_epi32(static_cast<int32_t>(value)); }

// --- the counter hash --------------------------------------------------------

// 0, 1, .. 7 times `stride` times kHashStep.
ARB_INLINE __m256i hash_lanes(uint32_t stride) {
  return _mm256_mullo_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), set1_ymm(stride * kHashStep));
}

// The finaliser but for its last line, x ^ (x >> 16).
ARB_INLINE __m256i hash_mix(__m256i x) {
  x = _mm256_mullo_epi32(_mm256_xor_si256(x, _mm256_srli_epi32(x, 16)), set1_ymm(kHashFirst));
  return _mm256_mullo_epi32(_mm256_xor_si256(x, _mm256_srli_epi32(x, 15)), set1_ymm(kHashSecond));
}

ARB_INLINE __m256i hash_bits(__m256i x) {
  x = hash_mix(x);
  return _mm256_xor_si256(x, _mm256_srli_epi32(x, 16));
}

// --- votes of a row ----------------------------------------------------------

// The 16 lanes of two registers, in the order of fold().
ARB_INLINE float fold_lanes(const __m256 lanes[2]) {
  const __m256 eight = _mm256_add_ps(lanes[0], lanes[1]);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

// Four vectors of numbers in -128..127 to 32 bytes.
ARB_INLINE __m256i narrow(const __m256i v[4]) {
  const __m256i packed = _mm256_packs_epi16(_mm256_packs_epi32(v[0], v[1]), _mm256_packs_epi32(v[2], v[3]));
  return _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

struct BySigns {
  BySigns(const TileRule&, const RowRule&) {}
};

struct ByFactors {
  __m256 row, largest, smallest;
  __m256i noise_start;
  __m128i noise_shift;

  ByFactors(const TileRule& tile, const RowRule& rule)
      : row(_mm256_set1_ps(rule.factor)),
        largest(_mm256_set1_ps(static_cast<float>(tile.limit) / 256.0f)),
        smallest(_mm256_set1_ps(static_cast<float>(-tile.limit) / 256.0f)),
        noise_start(_mm256_set1_epi32(tile.noise_start)),
        noise_shift(_mm_cvtsi32_si128(tile.noise_shift)) {}

  ARB_INLINE __m256i votes(__m256 g, const float* factor, __m256i hash) const {
    const __m256 p = _mm256_mul_ps(_mm256_mul_ps(g, row), _mm256_loadu_ps(factor));
    const __m256 number = _mm256_and_ps(p, _mm256_cmp_ps(p, p, _CMP_ORD_Q));
    const __m256 held = _mm256_max_ps(_mm256_min_ps(number, largest), smallest);
    // 24 bits times 2**-24 is exact, so that the fused sum is rounded as the sum alone would be.
    const __m256 bits = _mm256_cvtepi32_ps(_mm256_add_epi32(_mm256_srl_epi32(hash, noise_shift), noise_start));
    return _mm256_cvttps_epi32(_mm256_floor_ps(_mm256_fmadd_ps(bits, _mm256_set1_ps(0x1p-24f), held)));
  }
};

struct ByShifts {
  __m256i row, largest, smallest;
  const int32_t* bound;

  ByShifts(const TileRule& tile, const RowRule& rule)
      : row(_mm256_set1_epi32(tile.wide_shifts ? 0 : rule.shift - tile.power)),
        largest(_mm256_set1_epi32(tile.limit >> 8)),
        smallest(_mm256_set1_epi32(-(tile.limit >> 8))),
        bound(tile.bound) {}

  ARB_INLINE __m256i votes(__m256i g, const int32_t* column, __m256i hash) const {
    const __m256i zero = _mm256_setzero_si256(), one = _mm256_set1_epi32(1);
    const __m256i shift = _mm256_add_epi32(row, load_ymm(column));
    const __m256i right = _mm256_min_epi32(_mm256_max_epi32(shift, zero), _mm256_set1_epi32(31));
    const __m256i high = _mm256_i32gather_epi32(bound, right, 4);
    const __m256i held = _mm256_max_epi32(_mm256_min_epi32(g, high), _mm256_sub_epi32(zero, high));
    // (held + noise) >> right without a 33rd bit: the low parts are added as unsigned numbers.
    const __m256i mask = _mm256_sub_epi32(_mm256_sllv_epi32(one, right), one);
    const __m256i low = _mm256_add_epi32(_mm256_and_si256(held, mask), _mm256_and_si256(hash, mask));
    const __m256i v = _mm256_add_epi32(_mm256_srav_epi32(held, right), _mm256_srlv_epi32(low, right));
    const __m256i left = _mm256_cmpgt_epi32(zero, shift);
    if (__builtin_expect(_mm256_testz_si256(left, left), 1)) return v;
    const __m256i count = _mm256_min_epi32(_mm256_sub_epi32(zero, shift), _mm256_set1_epi32(16));
    const __m256i small = _mm256_max_epi32(_mm256_min_epi32(g, _mm256_set1_epi32(128)), _mm256_set1_epi32(-128));
    const __m256i shifted = _mm256_min_epi32(_mm256_sllv_epi32(small, count), largest);
    return _mm256_blendv_epi8(v, _mm256_max_epi32(shifted, smallest), left);
  }
};

// The same by a plan.
struct ByPlan {
  const ShiftPlan& plan;

  ByPlan(const TileRule&, const RowRule& rule) : plan(*rule.plan) {}

  ARB_INLINE __m256i votes(__m256i g, int64_t k, __m256i hash) const {
    const __m256i held = _mm256_min_epi32(_mm256_max_epi32(g, load_ymm(plan.low + k)), load_ymm(plan.high + k));
    const __m256i noise = _mm256_and_si256(hash, load_ymm(plan.mask + k));
    return _mm256_srav_epi32(_mm256_add_epi32(held, noise), load_ymm(plan.right + k));
  }
};

ARB_INLINE void add_to(float* sums, __m256 value) {
  _mm256_storeu_ps(sums, _mm256_add_ps(_mm256_loadu_ps(sums), value));
}

template <VoteRule rule_of>
void vote_float_rows(const float* from, int64_t columns, const TileRule& tile, const RowRule& rule, int8_t* v,
                     RowSums& row, const ColumnSums& column) {
  const __m256 largest = _mm256_set1_ps(kLargestFloat), smallest = _mm256_set1_ps(-kLargestFloat);
  const ByFactors factors(tile, rule);
  const __m256i lanes = hash_lanes(1);
  float* column_sizes = static_cast<float*>(column.sizes);
  __m256 squares[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()}, sizes[2] = {squares[0], squares[0]};
  int64_t nan = 0;
  for (int64_t c = 0; c < columns; c += kYmmVotes) {
    __m256i out[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const int64_t k = c + 8 * j;
      __m256 g = _mm256_loadu_ps(from + k);
      const __m256 good = _mm256_cmp_ps(g, g, _CMP_ORD_Q);
      const int numbers = _mm256_movemask_ps(good);
      if (__builtin_expect(numbers != 0xFF, 0)) nan += 8 - __builtin_popcount(static_cast<unsigned>(numbers));
      g = _mm256_max_ps(_mm256_min_ps(_mm256_and_ps(g, good), largest), smallest);
      const __m256 square = _mm256_mul_ps(g, g);
      squares[j % 2] = _mm256_add_ps(squares[j % 2], square);
      add_to(column.squares + k, square);
      if constexpr (rule_of == VoteRule::sign) {
        const __m256 zero = _mm256_setzero_ps();
        const __m256i up = _mm256_castps_si256(_mm256_cmp_ps(g, zero, _CMP_GT_OQ));
        const __m256i down = _mm256_castps_si256(_mm256_cmp_ps(g, zero, _CMP_LT_OQ));
        out[j] = _mm256_sub_epi32(down, up);
      } else {
        const __m256 size = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), g);
        sizes[j % 2] = _mm256_add_ps(sizes[j % 2], size);
        add_to(column_sizes + k, size);
        const uint32_t base = rule.hash + static_cast<uint32_t>(k) * kHashStep;
        out[j] = factors.votes(g, tile.column_factor + k, hash_bits(_mm256_add_epi32(lanes, set1_ymm(base))));
      }
    }
    store_ymm(v + c, narrow(out));
  }
  row = {fold_lanes(squares), rule_of == VoteRule::sign ? 0.0f : fold_lanes(sizes), 0, nan};
}

template <class Rule>
void vote_int32_rows(const int32_t* from, int64_t columns, const TileRule& tile, const RowRule& rule, int8_t* v,
                     RowSums& row, const ColumnSums& column) {
  constexpr bool planned = std::is_same_v<Rule, ByPlan>;
  const Rule rounding(tile, rule);
  const __m256 scale = _mm256_set1_ps(tile.scale);
  const __m256i one = _mm256_set1_epi32(1);
  __m256i index = _mm256_add_epi32(hash_lanes(1), set1_ymm(rule.hash));
  const __m256i low_half = _mm256_set1_epi64x(0xFFFFFFFF);
  uint32_t* column_sizes = static_cast<uint32_t*>(column.sizes);
  __m256 squares[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
  __m256i sizes = _mm256_setzero_si256();
  for (int64_t c = 0; c < columns; c += kYmmVotes) {
    __m256i out[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const int64_t k = c + 8 * j;
      const __m256i g = load_ymm(from + k);
      const __m256 wide = _mm256_cvtepi32_ps(g);
      const __m256 square = _mm256_mul_ps(wide, wide);
      squares[j % 2] = _mm256_add_ps(squares[j % 2], square);
      add_to(column.squares + k, square);
      if constexpr (std::is_same_v<Rule, BySigns>) {
        out[j] = _mm256_max_epi32(_mm256_min_epi32(g, one), _mm256_set1_epi32(-1));
      } else {
        const __m256i size = _mm256_abs_epi32(g);
        // A row has 64 of these in a lane at most, which a plan keeps within 32 bits.
        if constexpr (planned) {
          sizes = _mm256_add_epi32(sizes, size);
        } else {
          sizes = _mm256_add_epi64(sizes, _mm256_and_si256(size, low_half));
          sizes = _mm256_add_epi64(sizes, _mm256_srli_epi64(size, 32));
        }
        store_ymm(column_sizes + k, _mm256_add_epi32(load_ymm(column_sizes + k), size));
        const __m256i hash = hash_bits(index);
        index = _mm256_add_epi32(index, set1_ymm(8 * kHashStep));
        if constexpr (planned) {
          out[j] = rounding.votes(g, k, hash);
        } else if constexpr (std::is_same_v<Rule, ByFactors>) {
          out[j] = rounding.votes(_mm256_mul_ps(wide, scale), tile.column_factor + k, hash);
        } else {
          out[j] = rounding.votes(g, tile.column_shift + k, hash);
        }
      }
    }
    store_ymm(v + c, narrow(out));
  }
  if constexpr (planned) {
    sizes = _mm256_add_epi64(_mm256_and_si256(sizes, low_half), _mm256_srli_epi64(sizes, 32));
  }
  alignas(32) int64_t total[4];
  store_ymm(total, sizes);
  row = {fold_lanes(squares), 0.0f, total[0] + total[1] + total[2] + total[3], 0};
}

void vote_float_ymm(const void* g, int64_t columns, const TileRule& tile, const RowRule& rule, int8_t* v, RowSums& row,
                    const ColumnSums& column) {
  const float* from = static_cast<const float*>(g);
  if (tile.rule == VoteRule::sign) {
    vote_float_rows<VoteRule::sign>(from, columns, tile, rule, v, row, column);
  } else {
    vote_float_rows<VoteRule::factors>(from, columns, tile, rule, v, row, column);
  }
}

void vote_int32_ymm(const void* g, int64_t columns, const TileRule& tile, const RowRule& rule, int8_t* v, RowSums& row,
                    const ColumnSums& column) {
  const int32_t* from = static_cast<const int32_t*>(g);
  if (tile.rule == VoteRule::sign) {
    vote_int32_rows<BySigns>(from, columns, tile, rule, v, row, column);
  } else if (tile.rule == VoteRule::factors) {
    vote_int32_rows<ByFactors>(from, columns, tile, rule, v, row, column);
  } else if (rule.plan != nullptr) {
    vote_int32_rows<ByPlan>(from, columns, tile, rule, v, row, column);
  } else if (tile.wide_shifts) {
    vote_int32_plain(g, columns, tile, rule, v, row, column);
  } else {
    vote_int32_rows<ByShifts>(from, columns, tile, rule, v, row, column);
  }
}

// --- accumulators ------------------------------------------------------------

ARB_INLINE __m256i plane_shifts() { return _mm256_setr_epi32(0, 2, 4, 6, 0, 2, 4, 6); }

// Codes of 32 columns of a row, one a byte.
ARB_INLINE __m256i open_codes_ymm(CodeRow codes) {
  const __m256i words = _mm256_set_m128i(_mm_set1_epi32(static_cast<int32_t>(load32(codes + 64))),
                                         _mm_set1_epi32(static_cast<int32_t>(load32(codes))));
  return _mm256_and_si256(_mm256_srlv_epi32(words, plane_shifts()), _mm256_set1_epi8(3));
}

ARB_INLINE void close_codes_ymm(__m256i t, uint8_t* codes) {
  __m256i word = _mm256_sllv_epi32(t, plane_shifts());
  word = _mm256_or_si256(word, _mm256_shuffle_epi32(word, _MM_SHUFFLE(1, 0, 3, 2)));
  word = _mm256_or_si256(word, _mm256_shuffle_epi32(word, _MM_SHUFFLE(2, 3, 0, 1)));
  store32(codes, static_cast<uint32_t>(_mm256_extract_epi32(word, 0)));
  store32(codes + 64, static_cast<uint32_t>(_mm256_extract_epi32(word, 4)));
}

void cast_ymm(const int8_t* v, int64_t columns, VoteRange range, int8_t* votes, CodeRow codes, int32_t* score,
              int group_shift) {
  const __m256i low = _mm256_set1_epi8(static_cast<char>(range.low));
  const __m256i high = _mm256_set1_epi8(static_cast<char>(range.high));
  const __m256i ones = _mm256_set1_epi8(1), wide_ones = _mm256_set1_epi16(1);
  int64_t c = 0;
  for (; c + kYmmVotes <= columns; c += kYmmVotes) {
    const __m256i cast_votes = load_ymm(v + c);
    const __m256i a = _mm256_subs_epi8(load_ymm(votes + c), cast_votes);
    store_ymm(votes + c, _mm256_max_epi8(_mm256_min_epi8(a, high), low));
    if (score == nullptr) continue;
    // Pairs of products of at most 2 * 127, less pairs of votes: 16 bits are enough.
    const __m256i pairs = _mm256_sub_epi16(_mm256_maddubs_epi16(open_codes_ymm(codes + 4 * c), cast_votes),
                                           _mm256_maddubs_epi16(ones, cast_votes));
    const __m256i fours = _mm256_madd_epi16(pairs, wide_ones);
    __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(fours), _mm256_extracti128_si256(fours, 1));
    sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, _MM_SHUFFLE(1, 0, 3, 2)));
    sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, _MM_SHUFFLE(2, 3, 0, 1)));
    score[(c / kRun) >> group_shift] += _mm_cvtsi128_si32(sum);
  }
  if (c < columns) {
    cast_plain(v + c, columns - c, range, votes + c, codes + 4 * c,
               score == nullptr ? nullptr : score + ((c / kRun) >> group_shift), group_shift);
  }
}

// What 32 votes lose: size * decay + noise, the part above 16 bits. Words hold sizes up to 128.
ARB_INLINE __m256i decayed(__m256i size, __m256i decay, __m256i noise) {
  const __m256i low = _mm256_mullo_epi16(size, decay);
  // The sum carries where saturation changes it.
  const __m256i same = _mm256_cmpeq_epi16(_mm256_adds_epu16(low, noise), _mm256_add_epi16(low, noise));
  return _mm256_add_epi16(_mm256_add_epi16(_mm256_mulhi_epu16(size, decay), _mm256_set1_epi16(1)), same);
}

// The low 16 bits of the hashes that `even` and `odd` are the mixed forms of, in even and odd words: both halves of a
// mixed form, one upon the other.
ARB_INLINE __m256i hash_words(__m256i even, __m256i odd) {
  const __m256i low = _mm256_xor_si256(even, _mm256_srli_epi32(even, 16));
  const __m256i high = _mm256_xor_si256(odd, _mm256_slli_epi32(odd, 16));
  return _mm256_blend_epi16(low, high, 0xAA);
}

struct Decay {
  __m256i lanes = hash_lanes(4);
  __m256i share;

  explicit Decay(uint32_t decay) : share(_mm256_set1_epi16(static_cast<int16_t>(decay))) {}

  // Byte 4 d + i lies in byte i of dword d: words of even bytes hold bytes 0 and 2, those of odd bytes 1 and 3.
  ARB_INLINE __m256i apply(__m256i a, uint32_t hash) const {
    const __m256i base = _mm256_add_epi32(lanes, set1_ymm(hash));
    const __m256i even = hash_words(hash_mix(base), hash_mix(_mm256_add_epi32(base, set1_ymm(2 * kHashStep))));
    const __m256i odd = hash_words(hash_mix(_mm256_add_epi32(base, set1_ymm(kHashStep))),
                                   hash_mix(_mm256_add_epi32(base, set1_ymm(3 * kHashStep))));
    const __m256i size = _mm256_abs_epi8(a);
    const __m256i loss_even = decayed(_mm256_and_si256(size, _mm256_set1_epi16(0xFF)), share, even);
    const __m256i loss_odd = decayed(_mm256_srli_epi16(size, 8), share, odd);
    const __m256i left = _mm256_sub_epi8(size, _mm256_or_si256(loss_even, _mm256_slli_epi16(loss_odd, 8)));
    return _mm256_sign_epi8(left, a);
  }
};

struct Flip {
  FlipRule rule;
  __m256i above, below, theta, half, minus_half, leak;

  explicit Flip(const FlipRule& given)
      : rule(given),
        above(_mm256_set1_epi8(static_cast<char>(given.threshold - 1))),
        below(_mm256_set1_epi8(static_cast<char>(1 - given.threshold))),
        theta(_mm256_set1_epi8(static_cast<char>(given.threshold))),
        half(_mm256_set1_epi8(static_cast<char>(given.threshold / 2))),
        minus_half(_mm256_set1_epi8(static_cast<char>(-(given.threshold / 2)))),
        leak(_mm256_set1_epi8(static_cast<char>(given.leak < 128 ? given.leak : 128))) {}

  // Crossings of 32 votes, of which there are some.
  ARB_INLINE __m256i apply(__m256i a, __m256i up, __m256i down, uint8_t* codes, int64_t& flips) const {
    const __m256i t = open_codes_ymm(codes);
    const __m256i rises = _mm256_andnot_si256(_mm256_cmpeq_epi8(t, _mm256_set1_epi8(2)), up);
    const __m256i falls = _mm256_andnot_si256(_mm256_cmpeq_epi8(t, _mm256_setzero_si256()), down);
    const int moved = _mm256_movemask_epi8(_mm256_or_si256(rises, falls));
    if (moved != 0) {
      close_codes_ymm(_mm256_add_epi8(_mm256_sub_epi8(t, rises), falls), codes);
      flips += __builtin_popcount(static_cast<unsigned>(moved));
    }
    if (!rule.carry) return _mm256_andnot_si256(_mm256_or_si256(up, down), a);
    __m256i left = _mm256_sub_epi8(a, _mm256_and_si256(theta, rises));
    left = _mm256_add_epi8(left, _mm256_and_si256(theta, falls));
    left = _mm256_blendv_epi8(left, half, _mm256_andnot_si256(rises, up));
    return _mm256_blendv_epi8(left, minus_half, _mm256_andnot_si256(falls, down));
  }

  ARB_INLINE __m256i leaked(__m256i a) const { return _mm256_sign_epi8(_mm256_subs_epu8(_mm256_abs_epi8(a), leak), a); }
};

template <bool decays>
int64_t flip_rows(int8_t* votes, int64_t columns, uint8_t* codes, const FlipRule& rule, uint32_t hash) {
  const Flip flip(rule);
  const Decay decay(rule.decay);
  int64_t flips = 0, c = 0;
  for (; c + kYmmVotes <= columns; c += kYmmVotes) {
    __m256i a = load_ymm(votes + c);
    const __m256i up = _mm256_cmpgt_epi8(a, flip.above), down = _mm256_cmpgt_epi8(flip.below, a);
    const __m256i either = _mm256_or_si256(up, down);
    const bool crossed = !_mm256_testz_si256(either, either);
    if (crossed) a = flip.apply(a, up, down, codes + 4 * c, flips);
    if (rule.leak != 0) a = flip.leaked(a);
    if constexpr (decays) a = decay.apply(a, hash + static_cast<uint32_t>(c) * kHashStep);
    if (decays || crossed || rule.leak != 0) store_ymm(votes + c, a);
  }
  if (c < columns) {
    flips += flip_plain(votes + c, columns - c, codes + 4 * c, rule, hash + static_cast<uint32_t>(c) * kHashStep);
  }
  return flips;
}

int64_t flip_ymm(int8_t* votes, int64_t columns, uint8_t* codes, const FlipRule& rule, uint32_t hash) {
  if (rule.decay == 0) return flip_rows<false>(votes, columns, codes, rule, hash);
  // A whole accumulator does not fit in the 16 bits of the share.
  if (rule.decay > 0xFFFF) return flip_plain(votes, columns, codes, rule, hash);
  return flip_rows<true>(votes, columns, codes, rule, hash);
}

}  // namespace
}  // namespace arb
