// Votes with AVX-512 and its int8 dot products.
#include "votes_zmm_flips.h"

namespace arb {
namespace {

// --- packing and products ----------------------------------------------------

void interleave(const int8_t* const rows[4], uint8_t flip, uint8_t* step) {
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

void sum_panel(const int8_t* panel, int64_t steps, int32_t sums[kPanelRows]) {
  const __m256i ones = _mm256_set1_epi8(1);
  __m256i total = _mm256_setzero_si256();
  for (int64_t s = 0; s < steps; ++s) {
    const __m256i step = _mm256_maskz_loadu_epi32(0x3F, panel + s * 4 * kPanelRows);
    total = _mm256_dpbusd_epi32(total, ones, step);
  }
  _mm256_mask_storeu_epi32(sums, 0x3F, total);
}

// 6 rows x 64 columns: 24 accumulators, 4 vectors of activations and one broadcast gradient fill the register file.
constexpr int kVectors = 4;

void multiply_int8(const int8_t* panel, const uint8_t* strip, int64_t steps, const int32_t* start, int32_t* c,
                   int64_t ldc) {
  __m512i sum[kPanelRows][kVectors];
#pragma GCC unroll 6
  for (int r = 0; r < kPanelRows; ++r) {
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) {
      sum[r][j] = start != nullptr ? _mm512_set1_epi32(start[r]) : _mm512_loadu_si512(c + r * ldc + 16 * j);
    }
  }
  for (int64_t s = 0; s < steps; ++s, panel += 4 * kPanelRows, strip += kStepBytes) {
    __m512i x[kVectors];
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) x[j] = _mm512_load_si512(strip + 64 * j);
#pragma GCC unroll 6
    for (int r = 0; r < kPanelRows; ++r) {
      const __m512i g = _mm512_set1_epi32(static_cast<int32_t>(load32(panel + 4 * r)));
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) sum[r][j] = _mm512_dpbusd_epi32(sum[r][j], x[j], g);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < kPanelRows; ++r) {
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) _mm512_storeu_si512(c + r * ldc + 16 * j, sum[r][j]);
  }
}

void multiply_float(const float* panel, const float* strip, int64_t steps, bool fresh, float* c, int64_t ldc) {
  __m512 sum[kPanelRows][kVectors];
#pragma GCC unroll 6
  for (int r = 0; r < kPanelRows; ++r) {
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) {
      sum[r][j] = fresh ? _mm512_setzero_ps() : _mm512_loadu_ps(c + r * ldc + 16 * j);
    }
  }
  for (int64_t s = 0; s < steps; ++s, panel += kPanelRows, strip += kStripColumns) {
    __m512 x[kVectors];
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) x[j] = _mm512_load_ps(strip + 16 * j);
#pragma GCC unroll 6
    for (int r = 0; r < kPanelRows; ++r) {
      const __m512 g = _mm512_set1_ps(panel[r]);
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) sum[r][j] = _mm512_fmadd_ps(x[j], g, sum[r][j]);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < kPanelRows; ++r) {
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) _mm512_storeu_ps(c + r * ldc + 16 * j, sum[r][j]);
  }
}

}  // namespace

const VoteKernels& vote_kernels_avx512vnni() {
  static constexpr VoteKernels kernels = {0x80,
                                          multiply_int8,
                                          multiply_float,
                                          interleave,
                                          sum_panel,
                                          4 * kPanelRows,
                                          plan_shifts,
                                          {vote_float_512, vote_int32_512, vote_int64_plain},
                                          cast,
                                          flip_512,
                                          settle_plain,
                                          move_exponents_plain};
  return kernels;
}

}  // namespace arb
