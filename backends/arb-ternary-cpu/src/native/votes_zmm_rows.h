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
};

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
    const __mmask16 good = _mm512_cmp_ps_mask(p, p, _CMP_ORD_Q);
    const __m512 held = _mm512_max_ps(_mm512_maskz_min_ps(good, p, largest), smallest);
    // 24 bits times 2**-24 is exact, so that the fused sum is rounded as the sum alone would be.
    const __m512 bits = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_srl_epi32(hash, noise_shift), noise_start));
    return _mm512_cvt_roundps_epi32(_mm512_fmadd_ps(bits, unit, held), _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
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

// The same where has_plain_shifts() holds.
struct ByPlainShifts {
  __m512i row, bound[2], mask[2];

  ByPlainShifts(const TileRule& tile, const RowRule& rule)
      : row(_mm512_set1_epi32(tile.wide_shifts ? 0 : rule.shift - tile.power)) {
    const __m512i one = _mm512_set1_epi32(1);
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    for (int i = 0; i < 2; ++i) {
      bound[i] = _mm512_loadu_si512(tile.bound + 16 * i);
      mask[i] = _mm512_sub_epi32(_mm512_sllv_epi32(one, _mm512_add_epi32(lane, _mm512_set1_epi32(16 * i))), one);
    }
  }

  ARB_INLINE __m512i votes(__m512i g, const int32_t* column, __m512i hash) const {
    const __m512i right = _mm512_add_epi32(row, _mm512_loadu_si512(column));
    const __m512i high = _mm512_permutex2var_epi32(bound[0], right, bound[1]);
    const __m512i noise = _mm512_and_si512(hash, _mm512_permutex2var_epi32(mask[0], right, mask[1]));
    const __m512i held = _mm512_max_epi32(_mm512_min_epi32(g, high), _mm512_sub_epi32(_mm512_setzero_si512(), high));
    return _mm512_srav_epi32(_mm512_add_epi32(held, noise), right);
  }
};

template <VoteRule rule_of>
void vote_float_rows(const float* from, int64_t columns, const TileRule& tile, const RowRule& rule, int8_t* v,
                     RowSums& row, const ColumnSums& column) {
  const __m512 largest = _mm512_set1_ps(kLargestFloat), smallest = _mm512_set1_ps(-kLargestFloat);
  const ByFactors factors(tile, rule);
  const __m512i lanes = hash_lanes(1);
  float* column_sizes = static_cast<float*>(column.sizes);
  __m512 squares = _mm512_setzero_ps(), sizes = _mm512_setzero_ps();
  int64_t nan = 0;
  for (int64_t c = 0; c < columns; c += 64) {
    __m512i out[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const int64_t k = c + 16 * j;
      __m512 g = _mm512_loadu_ps(from + k);
      const __mmask16 good = _mm512_cmp_ps_mask(g, g, _CMP_ORD_Q);
      if (__builtin_expect(good != 0xFFFF, 0)) nan += 16 - __builtin_popcount(good);
      g = _mm512_max_ps(_mm512_maskz_min_ps(good, g, largest), smallest);
      const __m512 square = _mm512_mul_ps(g, g);
      squares = _mm512_add_ps(squares, square);
      _mm512_storeu_ps(column.squares + k, _mm512_add_ps(_mm512_loadu_ps(column.squares + k), square));
      if constexpr (rule_of == VoteRule::sign) {
        const __m512 zero = _mm512_setzero_ps();
        const __m512i up = _mm512_maskz_set1_epi32(_mm512_cmp_ps_mask(g, zero, _CMP_GT_OQ), 1);
        out[j] = _mm512_mask_set1_epi32(up, _mm512_cmp_ps_mask(g, zero, _CMP_LT_OQ), -1);
      } else {
        const __m512 size = _mm512_abs_ps(g);
        sizes = _mm512_add_ps(sizes, size);
        _mm512_storeu_ps(column_sizes + k, _mm512_add_ps(_mm512_loadu_ps(column_sizes + k), size));
        const __m512i hash = hash_bits(_mm512_add_epi32(lanes, set1(rule.hash + static_cast<uint32_t>(k) * kHashStep)));
        out[j] = factors.votes(g, tile.column_factor + k, hash);
      }
    }
    _mm512_storeu_si512(v + c, narrow(out));
  }
  row = {fold_lanes(squares), rule_of == VoteRule::sign ? 0.0f : fold_lanes(sizes), 0, nan};
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
    const __m512i sums = small ? _mm512_add_epi64(low_half(low), _mm512_srli_epi64(low, 32)) : _mm512_add_epi64(low, high);
    return _mm512_reduce_add_epi64(sums);
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
        if constexpr (std::is_same_v<Rule, ByFactors>) {
          out[j] = rounding.votes(_mm512_mul_ps(wide, scale), tile.column_factor + k, hash);
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
    vote_float_rows<VoteRule::sign>(from, columns, tile, rule, v, row, column);
  } else {
    vote_float_rows<VoteRule::factors>(from, columns, tile, rule, v, row, column);
  }
}

void vote_int32_512(const void* g, int64_t columns, const TileRule& tile, const RowRule& rule, int8_t* v, RowSums& row,
                    const ColumnSums& column) {
  const int32_t* from = static_cast<const int32_t*>(g);
  if (tile.rule == VoteRule::sign) {
    vote_int32_rows<BySigns, true>(from, columns, tile, rule, v, row, column);
  } else if (tile.rule == VoteRule::factors) {
    vote_int32_rows<ByFactors, false>(from, columns, tile, rule, v, row, column);
  } else if (tile.wide_shifts) {
    vote_int32_plain(g, columns, tile, rule, v, row, column);
  } else if (tile.small_sizes && has_plain_shifts(tile, rule)) {
    vote_int32_rows<ByPlainShifts, true>(from, columns, tile, rule, v, row, column);
  } else {
    vote_int32_rows<ByShifts, false>(from, columns, tile, rule, v, row, column);
  }
}

// --- accumulators ------------------------------------------------------------

// The first `columns` of 64 bytes, those beyond read as 0. Whole vectors are moved without a mask: with one, the
// processor does not see a stream that it could fetch ahead.
ARB_INLINE __m512i load_bytes(const int8_t* from, int64_t columns) {
  if (__builtin_expect(columns >= 64, 1)) return _mm512_loadu_si512(from);
  return _mm512_maskz_loadu_epi8((1ull << columns) - 1, from);
}

ARB_INLINE void store_bytes(int8_t* to, __m512i value, int64_t columns) {
  if (__builtin_expect(columns >= 64, 1)) {
    _mm512_storeu_si512(to, value);
  } else {
    _mm512_mask_storeu_epi8(to, (1ull << columns) - 1, value);
  }
}

ARB_INLINE __m512i plane_shifts() { return _mm512_set4_epi32(6, 4, 2, 0); }

// Codes of 64 columns of a row, one a byte. Blocks beyond the last are not read.
ARB_INLINE __m512i open_codes_512(CodeRow codes, int64_t columns) {
  int32_t word[4];
  for (int j = 0; j < 4; ++j) {
    word[j] = 16 * j < columns ? static_cast<int32_t>(load32(codes + 64 * j)) : 0x55555555;
  }
  const __m512i spread = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
  const __m512i words = _mm512_castsi128_si512(_mm_setr_epi32(word[0], word[1], word[2], word[3]));
  const __m512i planes = _mm512_srlv_epi32(_mm512_permutexvar_epi32(spread, words), plane_shifts());
  return _mm512_and_si512(planes, _mm512_set1_epi8(3));
}

ARB_INLINE void close_codes_512(__m512i t, int64_t columns, uint8_t* codes) {
  __m512i word = _mm512_sllv_epi32(t, plane_shifts());
  word = _mm512_or_si512(word, _mm512_shuffle_epi32(word, _MM_PERM_BADC));
  word = _mm512_or_si512(word, _mm512_shuffle_epi32(word, _MM_PERM_CDAB));
  alignas(64) uint32_t out[16];
  _mm512_store_si512(out, word);
  for (int j = 0; j < 4 && 16 * j < columns; ++j) store32(codes + 64 * j, out[4 * j]);
}

void cast(const int8_t* v, int64_t columns, VoteRange range, int8_t* votes, CodeRow codes, int32_t* score) {
  const __m512i low = _mm512_set1_epi8(static_cast<char>(range.low));
  const __m512i high = _mm512_set1_epi8(static_cast<char>(range.high));
  const __m512i ones = _mm512_set1_epi8(1);
  for (int64_t c = 0; c < columns; c += 64) {
    const __m512i cast_votes = load_bytes(v + c, columns - c);
    const __m512i a = _mm512_subs_epi8(load_bytes(votes + c, columns - c), cast_votes);
    store_bytes(votes + c, _mm512_max_epi8(_mm512_min_epi8(a, high), low), columns - c);
    if (score == nullptr) continue;
    const __m512i t = open_codes_512(codes + 4 * c, columns - c);
    const __m512i zero = _mm512_setzero_si512();
    const __m512i sums =
        _mm512_sub_epi32(_mm512_dpbusd_epi32(zero, t, cast_votes), _mm512_dpbusd_epi32(zero, ones, cast_votes));
    const __m256i pairs = _mm256_hadd_epi32(_mm512_castsi512_si256(sums), _mm512_extracti64x4_epi64(sums, 1));
    const __m256i fours = _mm256_hadd_epi32(pairs, pairs);
    const __m128i runs = _mm_add_epi32(_mm256_castsi256_si128(fours), _mm256_extracti128_si256(fours, 1));
    int32_t* out = score + c / kRun;
    out[0] = _mm_cvtsi128_si32(runs);
    if (columns - c > kRun) out[1] = _mm_extract_epi32(runs, 1);
  }
}

// What 32 votes lose: size * decay + noise, the part above 16 bits. Words hold sizes up to 128.
ARB_INLINE __m512i decayed(__m512i size, __m512i decay, __m512i noise) {
  const __m512i low = _mm512_add_epi16(_mm512_mullo_epi16(size, decay), noise);
  const __m512i loss = _mm512_mulhi_epu16(size, decay);
  const __mmask32 carry = _mm512_cmplt_epu16_mask(low, noise);
  return _mm512_mask_add_epi16(loss, carry, loss, _mm512_set1_epi16(1));
}

// The low 16 bits of the hashes that `even` and `odd` are the mixed forms of, in even and odd words: both halves of a
// mixed form, one upon the other.
ARB_INLINE __m512i hash_words(__m512i even, __m512i odd) {
  const __m512i own = _mm512_mask_blend_epi16(0xAAAAAAAA, even, odd);
  const __m512i other = _mm512_mask_blend_epi16(0xAAAAAAAA, odd, even);
  return _mm512_xor_si512(own, _mm512_rol_epi32(other, 16));
}

struct Decay {
  __m512i lanes = hash_lanes(4);
  __m512i share;

  explicit Decay(uint32_t decay) : share(_mm512_set1_epi16(static_cast<int16_t>(decay))) {}

  // Byte 4 d + i lies in byte i of dword d: words of even bytes hold bytes 0 and 2, those of odd bytes 1 and 3.
  ARB_INLINE __m512i apply(__m512i a, uint32_t hash) const {
    const __m512i base = _mm512_add_epi32(lanes, set1(hash));
    const __m512i even = hash_words(hash_mix(base), hash_mix(_mm512_add_epi32(base, set1(2 * kHashStep))));
    const __m512i odd = hash_words(hash_mix(_mm512_add_epi32(base, set1(kHashStep))),
                                   hash_mix(_mm512_add_epi32(base, set1(3 * kHashStep))));
    const __m512i size = _mm512_abs_epi8(a);
    const __m512i loss_even = decayed(_mm512_and_si512(size, _mm512_set1_epi16(0xFF)), share, even);
    const __m512i loss_odd = decayed(_mm512_srli_epi16(size, 8), share, odd);
    const __m512i left = _mm512_sub_epi8(size, _mm512_or_si512(loss_even, _mm512_slli_epi16(loss_odd, 8)));
    return _mm512_mask_sub_epi8(left, _mm512_movepi8_mask(a), _mm512_setzero_si512(), left);
  }
};

struct Flip {
  FlipRule rule;
  __m512i theta, minus_theta, half, leak;

  explicit Flip(const FlipRule& given)
      : rule(given),
        theta(_mm512_set1_epi8(static_cast<char>(given.threshold))),
        minus_theta(_mm512_set1_epi8(static_cast<char>(-given.threshold))),
        half(_mm512_set1_epi8(static_cast<char>(given.threshold / 2))),
        leak(_mm512_set1_epi8(static_cast<char>(given.leak < 128 ? given.leak : 128))) {}

  ARB_INLINE __mmask64 up(__m512i a) const { return _mm512_cmpge_epi8_mask(a, theta); }
  ARB_INLINE __mmask64 down(__m512i a) const { return _mm512_cmple_epi8_mask(a, minus_theta); }

  // Crossings of 64 votes, of which there are some.
  ARB_INLINE __m512i apply(__m512i a, __mmask64 up, __mmask64 down, uint8_t* codes, int64_t columns,
                           int64_t& flips) const {
    const __m512i zero = _mm512_setzero_si512(), one = _mm512_set1_epi8(1);
    const __m512i t = open_codes_512(codes, columns);
    const __mmask64 rises = up & _mm512_cmpneq_epi8_mask(t, _mm512_set1_epi8(2));
    const __mmask64 falls = down & _mm512_cmpneq_epi8_mask(t, zero);
    const __m512i after = _mm512_mask_sub_epi8(_mm512_mask_add_epi8(t, rises, t, one), falls, t, one);
    close_codes_512(after, columns, codes);
    flips += __builtin_popcountll(rises | falls);
    if (!rule.carry) return _mm512_mask_blend_epi8(up | down, a, zero);
    __m512i left = _mm512_mask_sub_epi8(a, rises, a, theta);
    left = _mm512_mask_add_epi8(left, falls, a, theta);
    left = _mm512_mask_blend_epi8(up & ~rises, left, half);
    return _mm512_mask_sub_epi8(left, down & ~falls, zero, half);
  }

  ARB_INLINE __m512i leaked(__m512i a) const {
    const __m512i size = _mm512_subs_epu8(_mm512_abs_epi8(a), leak);
    return _mm512_mask_sub_epi8(size, _mm512_movepi8_mask(a), _mm512_setzero_si512(), size);
  }
};

// Registers of votes that pass through all stages before the next ones: they stay in the first-level cache.
constexpr int64_t kStretch = 64;

// Up to kStretch registers. Which of them hold crossings is a coin toss, so it is not branched upon: their numbers are
// listed, then those on the list are flipped, then all decay.
template <bool decays>
int64_t flip_stretch(int8_t* votes, int64_t columns, uint8_t* codes, const Flip& flip, const Decay& decay,
                     uint32_t hash) {
  uint8_t crossed[kStretch];
  int64_t count = 0, flips = 0;
  for (int64_t c = 0; c < columns; c += 64) {
    const __m512i a = load_bytes(votes + c, columns - c);
    crossed[count] = static_cast<uint8_t>(c / 64);
    count += (flip.up(a) | flip.down(a)) != 0;
  }
  for (int64_t i = 0; i < count; ++i) {
    const int64_t c = 64 * crossed[i];
    const __m512i a = load_bytes(votes + c, columns - c);
    store_bytes(votes + c, flip.apply(a, flip.up(a), flip.down(a), codes + 4 * c, columns - c, flips), columns - c);
  }
  if (!decays && flip.rule.leak == 0) return flips;
  for (int64_t c = 0; c < columns; c += 64) {
    __m512i a = load_bytes(votes + c, columns - c);
    if (flip.rule.leak != 0) a = flip.leaked(a);
    if constexpr (decays) a = decay.apply(a, hash + static_cast<uint32_t>(c) * kHashStep);
    store_bytes(votes + c, a, columns - c);
  }
  return flips;
}

template <bool decays>
int64_t flip_rows(int8_t* votes, int64_t columns, uint8_t* codes, const FlipRule& rule, uint32_t hash) {
  const Flip flip(rule);
  const Decay decay(rule.decay);
  int64_t flips = 0;
  for (int64_t c = 0; c < columns; c += 64 * kStretch) {
    const int64_t count = columns - c < 64 * kStretch ? columns - c : 64 * kStretch;
    flips += flip_stretch<decays>(votes + c, count, codes + 4 * c, flip, decay,
                                  hash + static_cast<uint32_t>(c) * kHashStep);
  }
  return flips;
}

int64_t flip_512(int8_t* votes, int64_t columns, uint8_t* codes, const FlipRule& rule, uint32_t hash) {
  if (rule.decay == 0) return flip_rows<false>(votes, columns, codes, rule, hash);
  // A whole accumulator does not fit in the 16 bits of the share.
  if (rule.decay > 0xFFFF) return flip_plain(votes, columns, codes, rule, hash);
  return flip_rows<true>(votes, columns, codes, rule, hash);
}

}  // namespace
}  // namespace arb
