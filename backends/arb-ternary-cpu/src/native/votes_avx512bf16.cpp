// Gradients of bfloat16 with AVX-512: two tokens a lane and instruction. All else is as with AVX-512 VNNI.
#include <immintrin.h>

#include "votes.h"

namespace arb {
namespace {

// 6 rows x 64 columns, as in votes_avx512vnni.cpp.
constexpr int kVectors = 4;

inline __m512bh as_pairs(__m512i words) { return reinterpret_cast<__m512bh>(words); }

void multiply_pairs(const uint32_t* panel, const uint32_t* strip, int64_t steps, bool fresh, float* c, int64_t ldc) {
  __m512 sum[kPanelRows][kVectors];
#pragma GCC unroll 6
  for (int r = 0; r < kPanelRows; ++r) {
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) {
      sum[r][j] = fresh ? _mm512_setzero_ps() : _mm512_loadu_ps(c + r * ldc + 16 * j);
    }
  }
  for (int64_t s = 0; s < steps; ++s, panel += kPanelRows, strip += kStripColumns) {
    __m512i x[kVectors];
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) x[j] = _mm512_load_si512(strip + 16 * j);
#pragma GCC unroll 6
    for (int r = 0; r < kPanelRows; ++r) {
      const __m512i g = _mm512_set1_epi32(static_cast<int32_t>(panel[r]));
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) sum[r][j] = _mm512_dpbf16_ps(sum[r][j], as_pairs(x[j]), as_pairs(g));
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < kPanelRows; ++r) {
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) _mm512_storeu_ps(c + r * ldc + 16 * j, sum[r][j]);
  }
}

// An int8 as the float32 that has the bits of its bfloat16 and 16 zeros.
inline __m512i widen_int8(const int8_t* from) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)));
}

inline __m512i widen_words(const uint16_t* from) {
  return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}

void pair_int8(const int8_t* const rows[2], uint32_t* step) {
  for (int64_t c = 0; c < kStripColumns; c += 16) {
    const __m512i low = _mm512_srli_epi32(widen_int8(rows[0] + c), 16);
    _mm512_storeu_si512(step + c, _mm512_or_si512(low, widen_int8(rows[1] + c)));
  }
}

void pair_bfloat16(const uint16_t* const rows[2], uint32_t* step) {
  for (int64_t c = 0; c < kStripColumns; c += 16) {
    const __m512i high = _mm512_slli_epi32(widen_words(rows[1] + c), 16);
    _mm512_storeu_si512(step + c, _mm512_or_si512(widen_words(rows[0] + c), high));
  }
}

VoteKernels with_pairs() {
  VoteKernels kernels = vote_kernels_avx512vnni();
  kernels.multiply_pairs = multiply_pairs;
  kernels.pair_int8 = pair_int8;
  kernels.pair_bfloat16 = pair_bfloat16;
  return kernels;
}

}  // namespace

const VoteKernels& vote_kernels_avx512bf16() {
  static const VoteKernels kernels = with_pairs();
  return kernels;
}

}  // namespace arb
