// Accumulators of votes with 512-bit registers: what is added to them, flips and decay.
#pragma once

#include "votes_zmm_rows.h"

namespace arb {
namespace {

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

// Sums of the halves, runs of 32 columns, of eight registers: 16 of them in their order.
ARB_INLINE __m512i sums_of_runs(const __m512i of[8]) {
  __m512i pairs[4], fours[2];
  for (int i = 0; i < 4; ++i) {
    pairs[i] = _mm512_add_epi32(_mm512_unpacklo_epi32(of[2 * i], of[2 * i + 1]),
                                _mm512_unpackhi_epi32(of[2 * i], of[2 * i + 1]));
  }
  for (int i = 0; i < 2; ++i) {
    fours[i] = _mm512_add_epi32(_mm512_unpacklo_epi64(pairs[2 * i], pairs[2 * i + 1]),
                                _mm512_unpackhi_epi64(pairs[2 * i], pairs[2 * i + 1]));
  }
  // Lane l of fours[i]: what lane l of registers 4 i .. 4 i + 3 sums to.
  const __m512i runs = _mm512_add_epi32(_mm512_shuffle_i32x4(fours[0], fours[1], 0x88),
                                        _mm512_shuffle_i32x4(fours[0], fours[1], 0xDD));
  return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15), runs);
}

ARB_INLINE void add_scores(__m512i runs, int64_t count, int group_shift, int32_t* score) {
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 0, 2, 4, 6, 8, 10, 12, 14);
  const __m512i odd = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 1, 3, 5, 7, 9, 11, 13, 15);
  for (int i = 0; i < group_shift; ++i) {
    runs = _mm512_add_epi32(_mm512_permutexvar_epi32(even, runs), _mm512_permutexvar_epi32(odd, runs));
  }
  const int64_t groups = (count + (int64_t{1} << group_shift) - 1) >> group_shift;
  const __mmask16 held = static_cast<__mmask16>((1u << groups) - 1);
  _mm512_mask_storeu_epi32(score, held, _mm512_add_epi32(_mm512_maskz_loadu_epi32(held, score), runs));
}

// Up to 512 columns.
template <bool scores>
ARB_INLINE void cast_part(const int8_t* v, int64_t columns, VoteRange range, int8_t* votes, CodeRow codes,
                          int32_t* score, int group_shift) {
  const __m512i low = _mm512_set1_epi8(static_cast<char>(range.low));
  const __m512i high = _mm512_set1_epi8(static_cast<char>(range.high));
  const __m512i zero = _mm512_setzero_si512(), ones = _mm512_set1_epi8(1);
  __m512i sums[8] = {zero, zero, zero, zero, zero, zero, zero, zero};
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    const int64_t c = 64 * i, left = columns - c;
    if (left <= 0) break;
    const __m512i cast_votes = load_bytes(v + c, left);
    const __m512i a = _mm512_subs_epi8(load_bytes(votes + c, left), cast_votes);
    store_bytes(votes + c, _mm512_max_epi8(_mm512_min_epi8(a, high), low), left);
    if constexpr (scores) {
      const __m512i t = open_codes_512(codes + 4 * c, left);
      sums[i] = _mm512_sub_epi32(_mm512_dpbusd_epi32(zero, t, cast_votes), _mm512_dpbusd_epi32(zero, ones, cast_votes));
    }
  }
  if constexpr (scores) add_scores(sums_of_runs(sums), (columns + kRun - 1) / kRun, group_shift, score);
}

void cast(const int8_t* v, int64_t columns, VoteRange range, int8_t* votes, CodeRow codes, int32_t* score,
          int group_shift) {
  for (int64_t c = 0; c < columns; c += 512) {
    const int64_t count = columns - c < 512 ? columns - c : 512;
    if (score == nullptr) {
      cast_part<false>(v + c, count, range, votes + c, codes + 4 * c, nullptr, 0);
    } else if (count == 512) {
      cast_part<true>(v + c, 512, range, votes + c, codes + 4 * c, score + ((c / kRun) >> group_shift), group_shift);
    } else {
      cast_part<true>(v + c, count, range, votes + c, codes + 4 * c, score + ((c / kRun) >> group_shift), group_shift);
    }
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
