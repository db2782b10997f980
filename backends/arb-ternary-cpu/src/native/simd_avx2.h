// Sixteen lanes of 32 bits in two registers: AVX2, with AVX-VNNI where the translation unit is compiled for it.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace arb {
namespace {

struct V {
  __m256i a, b;
};
struct F {
  __m256 a, b;
};

constexpr int64_t kTileStrips = 1;
#if defined(__AVXVNNI__)
constexpr int64_t kTileRows = 6;
#else
constexpr int64_t kTileRows = 4;  // the products pass through two more registers
#endif
constexpr int64_t kTileRowsFloat = 6;
constexpr int64_t kFewRows = 1;
constexpr uint8_t kFlip = 0x80;
constexpr bool kUnsignedCodes = true;

inline __m256i load_half_of(const void* p, int64_t bytes) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(static_cast<const char*>(p) + bytes));
}
inline __m128i load_quarter(const void* p, int64_t bytes) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(static_cast<const char*>(p) + bytes));
}
inline __m128i load_eighth(const void* p, int64_t bytes) {
  return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(static_cast<const char*>(p) + bytes));
}

inline V load(const void* p) { return {load_half_of(p, 0), load_half_of(p, 32)}; }
inline void store(void* p, V v) {
  _mm256_storeu_si256(static_cast<__m256i*>(p), v.a);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(static_cast<char*>(p) + 32), v.b);
}
inline V zero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline V splat(int32_t x) {
  const __m256i v = _mm256_set1_epi32(x);
  return {v, v};
}
inline V add(V x, V y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
inline V sub(V x, V y) { return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)}; }
inline V mul(V x, V y) { return {_mm256_mullo_epi32(x.a, y.a), _mm256_mullo_epi32(x.b, y.b)}; }
inline V bit_and(V x, V y) { return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; }
inline V bit_or(V x, V y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
inline V bit_xor(V x, V y) { return {_mm256_xor_si256(x.a, y.a), _mm256_xor_si256(x.b, y.b)}; }
inline V select_bits(V x, V mask, V bits) { return bit_or(bit_and(x, mask), bits); }
template <int N>
inline V shift_left(V x) {
  return {_mm256_slli_epi32(x.a, N), _mm256_slli_epi32(x.b, N)};
}
template <int N>
inline V shift_right(V x) {
  return {_mm256_srli_epi32(x.a, N), _mm256_srli_epi32(x.b, N)};
}
template <int N>
inline V shift_right_signed(V x) {
  return {_mm256_srai_epi32(x.a, N), _mm256_srai_epi32(x.b, N)};
}
inline V shift_left(V x, V count) { return {_mm256_sllv_epi32(x.a, count.a), _mm256_sllv_epi32(x.b, count.b)}; }
inline V shift_right(V x, V count) { return {_mm256_srlv_epi32(x.a, count.a), _mm256_srlv_epi32(x.b, count.b)}; }
inline V max_signed(V x, V y) { return {_mm256_max_epi32(x.a, y.a), _mm256_max_epi32(x.b, y.b)}; }
inline V min_signed(V x, V y) { return {_mm256_min_epi32(x.a, y.a), _mm256_min_epi32(x.b, y.b)}; }
inline V choose_greater(V x, V limit, V yes, V no) {
  return {_mm256_blendv_epi8(no.a, yes.a, _mm256_cmpgt_epi32(x.a, limit.a)),
          _mm256_blendv_epi8(no.b, yes.b, _mm256_cmpgt_epi32(x.b, limit.b))};
}
inline V min_bytes(V x, V y) { return {_mm256_min_epi8(x.a, y.a), _mm256_min_epi8(x.b, y.b)}; }
inline V max_bytes(V x, V y) { return {_mm256_max_epi8(x.a, y.a), _mm256_max_epi8(x.b, y.b)}; }
inline V widen_u8(const void* p) {
  return {_mm256_cvtepu8_epi32(load_eighth(p, 0)), _mm256_cvtepu8_epi32(load_eighth(p, 8))};
}
inline V widen_i8(const void* p) {
  return {_mm256_cvtepi8_epi32(load_eighth(p, 0)), _mm256_cvtepi8_epi32(load_eighth(p, 8))};
}
inline void narrow_8(void* p, V v) {
  const __m256i low = _mm256_set1_epi32(0xFF);
  // 16-bit pairs of the halves' quarters: a0 b0 | a1 b1; then bytes a0 b0 - - | a1 b1 - -.
  const __m256i words = _mm256_packus_epi32(_mm256_and_si256(v.a, low), _mm256_and_si256(v.b, low));
  const __m256i bytes = _mm256_packus_epi16(words, words);
  const __m128i first = _mm256_castsi256_si128(bytes), second = _mm256_extracti128_si256(bytes, 1);
  // dwords: first = a0 b0, second = a1 b1; wanted a0 a1 b0 b1.
  _mm_storeu_si128(static_cast<__m128i*>(p), _mm_unpacklo_epi32(first, second));
}

// x is unsigned and at most 255, |w| at most 64: the 16-bit sums of two products are at most 32640 and never saturate.
inline __m256i dot_pair(__m256i acc, __m256i u, __m256i s) {
#if defined(__AVXVNNI__)
  return _mm256_dpbusd_avx_epi32(acc, u, s);
#else
  return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(u, s), _mm256_set1_epi16(1)));
#endif
}
inline V dot(V acc, V w, V x) { return {dot_pair(acc.a, x.a, w.a), dot_pair(acc.b, x.b, w.b)}; }
// Codes are at most 128 and x is at least -128: sums of two products lie within -32768 and 32512.
inline V dot_codes(V acc, V codes, V x) { return {dot_pair(acc.a, codes.a, x.a), dot_pair(acc.b, codes.b, x.b)}; }
#if !defined(__AVXVNNI__)
// Sums of two products of 16 bits. With weights of at most 1 << kPairSpread a block has no more than they hold.
#define ARB_PAIR_SUMS
constexpr int kPairSpread = 4;
constexpr int64_t kPairSteps = 64;  // of weights up to 1: 64 * 2 * 255 is below 2**15
// Written out, because gcc 12 copies every sum in every turn of a loop around the intrinsic.
[[gnu::always_inline]] inline void add_pairs(V& sums, V x, V w) {
  __asm__("vpaddw %1, %0, %0" : "+x"(sums.a) : "x"(_mm256_maddubs_epi16(x.a, w.a)));
  __asm__("vpaddw %1, %0, %0" : "+x"(sums.b) : "x"(_mm256_maddubs_epi16(x.b, w.b)));
}
inline V widen_pairs(V sums) {
  const __m256i ones = _mm256_set1_epi16(1);
  return {_mm256_madd_epi16(sums.a, ones), _mm256_madd_epi16(sums.b, ones)};
}
// Sums of which the second are four times too large.
inline V add_quarters(V ones, V fours) {
  return {_mm256_add_epi16(ones.a, _mm256_srai_epi16(fours.a, 2)), _mm256_add_epi16(ones.b, _mm256_srai_epi16(fours.b, 2))};
}
#endif
inline V lookup(V table, V index) {
  return {_mm256_shuffle_epi8(table.a, index.a), _mm256_shuffle_epi8(table.b, index.b)};
}
inline V transpose_bytes(V v) {
  const __m256i order =
      _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
  return {_mm256_shuffle_epi8(v.a, order), _mm256_shuffle_epi8(v.b, order)};
}
inline void transpose_quarters(const V in[4], V out[4]) {
  out[0] = {_mm256_permute2x128_si256(in[0].a, in[1].a, 0x20), _mm256_permute2x128_si256(in[2].a, in[3].a, 0x20)};
  out[1] = {_mm256_permute2x128_si256(in[0].a, in[1].a, 0x31), _mm256_permute2x128_si256(in[2].a, in[3].a, 0x31)};
  out[2] = {_mm256_permute2x128_si256(in[0].b, in[1].b, 0x20), _mm256_permute2x128_si256(in[2].b, in[3].b, 0x20)};
  out[3] = {_mm256_permute2x128_si256(in[0].b, in[1].b, 0x31), _mm256_permute2x128_si256(in[2].b, in[3].b, 0x31)};
}
// Sixteen rows of 16 bytes, `stride` apart: lane r of out[i] is bytes 4i .. 4i + 3 of row r.
inline void load_columns(const int8_t* p, int64_t stride, V out[4]) {
  alignas(64) int8_t columns[4][64];
  for (int r = 0; r < 16; ++r) {
    for (int i = 0; i < 4; ++i) std::memcpy(columns[i] + 4 * r, p + r * stride + 4 * i, 4);
  }
  for (int i = 0; i < 4; ++i) out[i] = load(columns[i]);
}
inline int32_t reduce_max(V v) {
  const __m256i both = _mm256_max_epi32(v.a, v.b);
  __m128i four = _mm_max_epi32(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
  four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4E));
  four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0xB1));
  return _mm_cvtsi128_si32(four);
}

inline F as_float(V v) { return {_mm256_castsi256_ps(v.a), _mm256_castsi256_ps(v.b)}; }
inline V as_bits(F f) { return {_mm256_castps_si256(f.a), _mm256_castps_si256(f.b)}; }
inline F to_float(V v) { return {_mm256_cvtepi32_ps(v.a), _mm256_cvtepi32_ps(v.b)}; }
inline V to_int(F f) { return {_mm256_cvtps_epi32(f.a), _mm256_cvtps_epi32(f.b)}; }
inline F loadf(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline F load_halves(const float* a, const float* b) { return {_mm256_loadu_ps(a), _mm256_loadu_ps(b)}; }
inline F load_quarters(const float* a, const float* b, const float* c, const float* d) {
  return {_mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(a)), _mm_loadu_ps(b), 1),
          _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(c)), _mm_loadu_ps(d), 1)};
}
inline void storef(float* p, F f) {
  _mm256_storeu_ps(p, f.a);
  _mm256_storeu_ps(p + 8, f.b);
}
inline F splatf(float x) {
  const __m256 f = _mm256_set1_ps(x);
  return {f, f};
}
inline F addf(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline F mulf(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline F divf(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
// 1 / a, up to two roundings, for 1 / a that is normal.
inline F reciprocal(F a) { return divf(splatf(1.0f), a); }
inline F fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline float reduce_sum(F x) {
  const __m256 eight = _mm256_add_ps(x.a, x.b);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline void reduce_sums(const F from[4], float sums[4]) {
  __m256 eight[4];
  for (int i = 0; i < 4; ++i) eight[i] = _mm256_add_ps(from[i].a, from[i].b);
  const __m256 all = _mm256_hadd_ps(_mm256_hadd_ps(eight[0], eight[1]), _mm256_hadd_ps(eight[2], eight[3]));
  _mm_storeu_ps(sums, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
}
inline F floorf16(F x) { return {_mm256_floor_ps(x.a), _mm256_floor_ps(x.b)}; }
inline V floor_to_int(F x) { return to_int(floorf16(x)); }
inline F clampf(F x, F low, F high) {
  return {_mm256_min_ps(high.a, _mm256_max_ps(low.a, x.a)), _mm256_min_ps(high.b, _mm256_max_ps(low.b, x.b))};
}
inline F load_half(const void* p) {
  return {_mm256_cvtph_ps(load_quarter(p, 0)), _mm256_cvtph_ps(load_quarter(p, 16))};
}
inline void store_half(void* p, F f) {
  _mm_storeu_si128(static_cast<__m128i*>(p), _mm256_cvtps_ph(f.a, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(static_cast<char*>(p) + 16),
                   _mm256_cvtps_ph(f.b, _MM_FROUND_TO_NEAREST_INT));
}
inline V widen_u16(const void* p) {
  return {_mm256_cvtepu16_epi32(load_quarter(p, 0)), _mm256_cvtepu16_epi32(load_quarter(p, 16))};
}
inline void narrow_16(void* p, V v) {
  const __m256i low = _mm256_set1_epi32(0xFFFF);
  const __m256i words = _mm256_packus_epi32(_mm256_and_si256(v.a, low), _mm256_and_si256(v.b, low));
  _mm256_storeu_si256(static_cast<__m256i*>(p), _mm256_permute4x64_epi64(words, 0xD8));
}

// Inlined at once, because gcc takes a function that only prefetches for one without effect.
[[gnu::always_inline]] inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
// Into the second-level cache: more of these may be under way.
[[gnu::always_inline]] inline void prefetch_far(const void* p) {
  _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1);
}

}  // namespace
}  // namespace arb
