// Packing and float products with 256-bit registers, for `avx2` and `avxvnni`.
#pragma once

#include <immintrin.h>

#include "votes_rows.h"

namespace arb {
namespace {

inline void interleave_ymm(const int8_t* const rows[4], uint8_t flip, uint8_t* step) {
  const __m128i bits = _mm_set1_epi8(static_cast<char>(flip));
  for (int64_t c = 0; c < kStripColumns; c += 16) {
    __m128i row[4];
    for (int i = 0; i < 4; ++i) {
      row[i] = _mm_xor_si128(_mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[i] + c)), bits);
    }
    const __m128i low01 = _mm_unpacklo_epi8(row[0], row[1]), high01 = _mm_unpackhi_epi8(row[0], row[1]);
    const __m128i low23 = _mm_unpacklo_epi8(row[2], row[3]), high23 = _mm_unpackhi_epi8(row[2], row[3]);
    __m128i* out = reinterpret_cast<__m128i*>(step + 4 * c);
    _mm_store_si128(out, _mm_unpacklo_epi16(low01, low23));
    _mm_store_si128(out + 1, _mm_unpackhi_epi16(low01, low23));
    _mm_store_si128(out + 2, _mm_unpacklo_epi16(high01, high23));
    _mm_store_si128(out + 3, _mm_unpackhi_epi16(high01, high23));
  }
}

// 6 rows x 16 columns at a time: 12 accumulators, 2 vectors of activations and a broadcast gradient of 16 registers.
inline void multiply_float_ymm(const float* panel, const float* strip, int64_t steps, bool fresh, float* c,
                               int64_t ldc) {
  for (int64_t k = 0; k < kStripColumns; k += 16) {
    __m256 sum[kPanelRows][2];
#pragma GCC unroll 6
    for (int r = 0; r < kPanelRows; ++r) {
      sum[r][0] = fresh ? _mm256_setzero_ps() : _mm256_loadu_ps(c + r * ldc + k);
      sum[r][1] = fresh ? _mm256_setzero_ps() : _mm256_loadu_ps(c + r * ldc + k + 8);
    }
    const float* g = panel;
    const float* x = strip + k;
    for (int64_t s = 0; s < steps; ++s, g += kPanelRows, x += kStripColumns) {
      const __m256 x0 = _mm256_load_ps(x), x1 = _mm256_load_ps(x + 8);
#pragma GCC unroll 6
      for (int r = 0; r < kPanelRows; ++r) {
        const __m256 row = _mm256_broadcast_ss(g + r);
        sum[r][0] = _mm256_fmadd_ps(x0, row, sum[r][0]);
        sum[r][1] = _mm256_fmadd_ps(x1, row, sum[r][1]);
      }
    }
#pragma GCC unroll 6
    for (int r = 0; r < kPanelRows; ++r) {
      _mm256_storeu_ps(c + r * ldc + k, sum[r][0]);
      _mm256_storeu_ps(c + r * ldc + k + 8, sum[r][1]);
    }
  }
}

ARB_INLINE __m256i load_ymm(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }

ARB_INLINE void store_ymm(void* to, __m256i value) { _mm256_storeu_si256(static_cast<__m256i*>(to), value); }

}  // namespace
}  // namespace arb
