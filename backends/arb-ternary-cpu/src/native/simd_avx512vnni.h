// Sixteen lanes of 32 bits in one register: AVX-512 with VNNI.
//
// All simd_<isa>.h define the same names, with internal linkage; products_loops.h is written in them. "Quarter" is a
// stretch of 128 bits: four lanes.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace arb {
namespace {

using V = __m512i;  // 16 x int32, or 64 bytes
using F = __m512;   // 16 x float32

constexpr int64_t kTileStrips = 2;
constexpr int64_t kTileRows = 8;
constexpr int64_t kTileRowsFloat = 8;
constexpr int64_t kFewRows = 4;
// dot() takes the operand that varies by row as unsigned bytes.
constexpr uint8_t kFlip = 0x80;
// dot_codes() takes unsigned codes, so that bit planes need no shift.
constexpr bool kUnsignedCodes = true;

inline V load(const void* p) { return _mm512_loadu_si512(p); }
inline void store(void* p, V v) { _mm512_storeu_si512(p, v); }
// Past the caches, to aligned addresses: results of more bytes than a cache holds are not read into it first.
#define ARB_STREAMS
inline void stream(void* p, V v) { _mm512_stream_si512(static_cast<__m512i*>(p), v); }
inline void stream_half(void* p, const void* bytes) {
  _mm256_stream_si256(static_cast<__m256i*>(p), _mm256_load_si256(static_cast<const __m256i*>(bytes)));
}
// The high halves of the lanes of `a`, then those of `b`; the low ones are zeros.
inline V narrow_high(V a, V b) {
  const V mixed = _mm512_packus_epi32(_mm512_srli_epi32(a, 16), _mm512_srli_epi32(b, 16));
  return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), mixed);
}
inline V zero() { return _mm512_setzero_si512(); }
inline V splat(int32_t x) { return _mm512_set1_epi32(x); }
inline V add(V a, V b) { return _mm512_add_epi32(a, b); }
inline V sub(V a, V b) { return _mm512_sub_epi32(a, b); }
inline V mul(V a, V b) { return _mm512_mullo_epi32(a, b); }
inline V bit_and(V a, V b) { return _mm512_and_si512(a, b); }
inline V bit_or(V a, V b) { return _mm512_or_si512(a, b); }
inline V bit_xor(V a, V b) { return _mm512_xor_si512(a, b); }
// a & mask | bits
inline V select_bits(V a, V mask, V bits) { return _mm512_ternarylogic_epi32(a, mask, bits, 0xEA); }
template <int N>
inline V shift_left(V a) {
  return _mm512_slli_epi32(a, N);
}
template <int N>
inline V shift_right(V a) {
  return _mm512_srli_epi32(a, N);
}
template <int N>
inline V shift_right_signed(V a) {
  return _mm512_srai_epi32(a, N);
}
// Lane by lane; a count outside 0..31 gives 0.
inline V shift_left(V a, V count) { return _mm512_sllv_epi32(a, count); }
inline V shift_right(V a, V count) { return _mm512_srlv_epi32(a, count); }
inline V max_signed(V a, V b) { return _mm512_max_epi32(a, b); }
inline V min_signed(V a, V b) { return _mm512_min_epi32(a, b); }
// a > limit ? yes : no
inline V choose_greater(V a, V limit, V yes, V no) {
  return _mm512_mask_blend_epi32(_mm512_cmpgt_epi32_mask(a, limit), no, yes);
}
inline V min_bytes(V a, V b) { return _mm512_min_epi8(a, b); }
inline V max_bytes(V a, V b) { return _mm512_max_epi8(a, b); }
inline V widen_u8(const void* p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p))); }
inline V widen_i8(const void* p) { return _mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p))); }
// The low bytes of the lanes.
inline void narrow_8(void* p, V v) { _mm_storeu_si128(static_cast<__m128i*>(p), _mm512_cvtepi32_epi8(v)); }

// acc += for each lane the four products of the bytes of `w` (signed) and `x` (flipped by kFlip).
inline V dot(V acc, V w, V x) { return _mm512_dpbusd_epi32(acc, x, w); }
// The same for codes up to 2 << 6 and signed x.
// Written out, because gcc 12 copies every accumulator in every turn of a loop around the intrinsic, where sums outlive
// several loops; that costs a quarter of the speed of few_int8.
inline V dot_codes(V acc, V codes, V x) {
  __asm__("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(codes), "v"(x));
  return acc;
}
// Within every quarter: byte i of the result is table[index[i]], for indices below 16.
inline V lookup(V table, V index) { return _mm512_shuffle_epi8(table, index); }
// The 4 x 4 bytes of every quarter, transposed.
inline V transpose_bytes(V v) {
  return _mm512_shuffle_epi8(
      v, _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15)));
}
// out[q] = quarter q of in[0], in[1], in[2], in[3].
inline void transpose_quarters(const V in[4], V out[4]) {
  const V low01 = _mm512_shuffle_i32x4(in[0], in[1], 0x44);   // 0:0 0:1 1:0 1:1
  const V high01 = _mm512_shuffle_i32x4(in[0], in[1], 0xEE);  // 0:2 0:3 1:2 1:3
  const V low23 = _mm512_shuffle_i32x4(in[2], in[3], 0x44);
  const V high23 = _mm512_shuffle_i32x4(in[2], in[3], 0xEE);
  out[0] = _mm512_shuffle_i32x4(low01, low23, 0x88);
  out[1] = _mm512_shuffle_i32x4(low01, low23, 0xDD);
  out[2] = _mm512_shuffle_i32x4(high01, high23, 0x88);
  out[3] = _mm512_shuffle_i32x4(high01, high23, 0xDD);
}
// Sixteen rows of 16 bytes, `stride` apart: lane r of out[i] is bytes 4i .. 4i + 3 of row r.
inline void load_columns(const int8_t* p, int64_t stride, V out[4]) {
  const V order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  V rows[4];
  for (int i = 0; i < 4; ++i) {
    const int8_t* from = p + 4 * i * stride;
    const auto row = [&](int r) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + r * stride)); };
    const V four = _mm512_inserti32x4(
        _mm512_inserti32x4(_mm512_inserti32x4(_mm512_castsi128_si512(row(0)), row(1), 1), row(2), 2), row(3), 3);
    rows[i] = _mm512_permutexvar_epi32(order, four);
  }
  transpose_quarters(rows, out);
}
inline bool any_nan(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q) != 0; }
inline int32_t reduce_max(V v) { return _mm512_reduce_max_epi32(v); }

inline F as_float(V v) { return _mm512_castsi512_ps(v); }
inline V as_bits(F f) { return _mm512_castps_si512(f); }
inline F to_float(V v) { return _mm512_cvtepi32_ps(v); }
// Rounded to nearest even; what does not fit gives a byte of 0 after narrow_8.
inline V to_int(F f) { return _mm512_cvtps_epi32(f); }
inline F loadf(const float* p) { return _mm512_loadu_ps(p); }
inline F load_halves(const float* a, const float* b) {
  return _mm512_insertf32x8(_mm512_castps256_ps512(_mm256_loadu_ps(a)), _mm256_loadu_ps(b), 1);
}
inline F load_quarters(const float* a, const float* b, const float* c, const float* d) {
  const __m512 first = _mm512_insertf32x4(_mm512_castps128_ps512(_mm_loadu_ps(a)), _mm_loadu_ps(b), 1);
  return _mm512_insertf32x4(_mm512_insertf32x4(first, _mm_loadu_ps(c), 2), _mm_loadu_ps(d), 3);
}
inline void storef(float* p, F f) { _mm512_storeu_ps(p, f); }
inline F splatf(float x) { return _mm512_set1_ps(x); }
inline F addf(F a, F b) { return _mm512_add_ps(a, b); }
inline F mulf(F a, F b) { return _mm512_mul_ps(a, b); }
inline F divf(F a, F b) { return _mm512_div_ps(a, b); }
inline F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
// 1 / a, up to two roundings, for 1 / a that is normal: an estimate of 14 bits and a step of Newton's, which take less
// time than a division.
inline F reciprocal(F a) {
  const F estimate = _mm512_rcp14_ps(a);
  return _mm512_fmadd_ps(_mm512_fnmadd_ps(a, estimate, _mm512_set1_ps(1.0f)), estimate, estimate);
}
inline float reduce_sum(F a) { return _mm512_reduce_add_ps(a); }
inline void reduce_sums(const F from[4], float sums[4]) {
  const F ab = _mm512_add_ps(_mm512_unpacklo_ps(from[0], from[1]), _mm512_unpackhi_ps(from[0], from[1]));
  const F cd = _mm512_add_ps(_mm512_unpacklo_ps(from[2], from[3]), _mm512_unpackhi_ps(from[2], from[3]));
  const F all = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xEE));
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
  _mm_storeu_ps(sums, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
}
inline F floorf16(F a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
// to_int(floorf16(a))
inline V floor_to_int(F a) { return _mm512_cvt_roundps_epi32(a, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
// A NaN in `a` is passed on.
inline F clampf(F a, F low, F high) { return _mm512_min_ps(high, _mm512_max_ps(low, a)); }

inline F load_half(const void* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(p))); }
inline void store_half(void* p, F f) {
  _mm256_storeu_si256(static_cast<__m256i*>(p), _mm512_cvtps_ph(f, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline V widen_u16(const void* p) { return _mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(p))); }
inline void narrow_16(void* p, V v) { _mm256_storeu_si256(static_cast<__m256i*>(p), _mm512_cvtepi32_epi16(v)); }

// For translation units with AVX512-BF16 whose results need not have the bits of other instruction sets: one
// instruction rounds, and takes subnormal numbers for 0.
#if defined(ARB_HARDWARE_BFLOAT16)
inline void store_bfloat16(void* p, F f) {
  _mm256_storeu_si256(static_cast<__m256i*>(p), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(f)));
}
#endif

// Inlined at once, because gcc takes a function that only prefetches for one without effect.
[[gnu::always_inline]] inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
// Into the second-level cache: more of these may be under way.
[[gnu::always_inline]] inline void prefetch_far(const void* p) {
  _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1);
}

}  // namespace
}  // namespace arb
