// Votes with AVX2. The products of int8 are taken in pairs of 16 bits, which sum to 32 without saturating.
#include "votes_ymm_rows.h"

namespace arb {
namespace {

constexpr int64_t kPairStep = 8 * kPanelRows;
constexpr int kRows = 3;

void sum_panel(const int8_t* panel, int64_t steps, int32_t sums[kPanelRows]) {
  const __m128i ones = _mm_set1_epi16(1);
  __m128i total[3] = {_mm_setzero_si128(), _mm_setzero_si128(), _mm_setzero_si128()};
  for (int64_t s = 0; s < steps; ++s, panel += kPairStep) {
    for (int i = 0; i < 3; ++i) {
      const __m128i pairs = _mm_loadu_si128(reinterpret_cast<const __m128i*>(panel + 16 * i));
      total[i] = _mm_add_epi32(total[i], _mm_madd_epi16(pairs, ones));
    }
  }
  alignas(16) uint32_t out[12];
  for (int i = 0; i < 3; ++i) _mm_store_si128(reinterpret_cast<__m128i*>(out + 4 * i), total[i]);
  for (int64_t r = 0; r < kPanelRows; ++r) sums[r] = static_cast<int32_t>(out[2 * r] + out[2 * r + 1]);
}

// 3 rows x 16 columns: 6 accumulators, activations as two vectors of tokens 0 and 2 and two of tokens 1 and 3.
void multiply_three(const int8_t* panel, const uint8_t* strip, int64_t steps, const int32_t* start, int32_t* c,
                    int64_t ldc) {
  const __m256i low = _mm256_set1_epi16(0xFF);
  __m256i sum[kRows][2];
#pragma GCC unroll 3
  for (int r = 0; r < kRows; ++r) {
    sum[r][0] = start != nullptr ? _mm256_set1_epi32(start[r]) : load_ymm(c + r * ldc);
    sum[r][1] = start != nullptr ? sum[r][0] : load_ymm(c + r * ldc + 8);
  }
  for (int64_t s = 0; s < steps; ++s, panel += kPairStep, strip += kStepBytes) {
    const __m256i x0 = load_ymm(strip), x1 = load_ymm(strip + 32);
    const __m256i even0 = _mm256_and_si256(x0, low), odd0 = _mm256_srli_epi16(x0, 8);
    const __m256i even1 = _mm256_and_si256(x1, low), odd1 = _mm256_srli_epi16(x1, 8);
#pragma GCC unroll 3
    for (int r = 0; r < kRows; ++r) {
      const __m256i even = _mm256_set1_epi32(static_cast<int32_t>(load32(panel + 8 * r)));
      const __m256i odd = _mm256_set1_epi32(static_cast<int32_t>(load32(panel + 8 * r + 4)));
      sum[r][0] = _mm256_add_epi32(sum[r][0], _mm256_madd_epi16(even0, even));
      sum[r][1] = _mm256_add_epi32(sum[r][1], _mm256_madd_epi16(even1, even));
      sum[r][0] = _mm256_add_epi32(sum[r][0], _mm256_madd_epi16(odd0, odd));
      sum[r][1] = _mm256_add_epi32(sum[r][1], _mm256_madd_epi16(odd1, odd));
    }
  }
#pragma GCC unroll 3
  for (int r = 0; r < kRows; ++r) {
    store_ymm(c + r * ldc, sum[r][0]);
    store_ymm(c + r * ldc + 8, sum[r][1]);
  }
}

void multiply_int8(const int8_t* panel, const uint8_t* strip, int64_t steps, const int32_t* start, int32_t* c,
                   int64_t ldc) {
  for (int64_t k = 0; k < kStripColumns; k += 16) {
    for (int64_t r = 0; r < kPanelRows; r += kRows) {
      multiply_three(panel + 8 * r, strip + 4 * k, steps, start == nullptr ? nullptr : start + r, c + r * ldc + k, ldc);
    }
  }
}

}  // namespace

const VoteKernels& vote_kernels_avx2() {
  static constexpr VoteKernels kernels = {0x80,
                                          multiply_int8,
                                          multiply_float_ymm,
                                          interleave_ymm,
                                          sum_panel,
                                          kPairStep,
                                          plan_shifts,
                                          {vote_float_ymm, vote_int32_ymm, vote_int64_plain},
                                          cast_ymm,
                                          flip_ymm,
                                          settle_plain,
                                          move_exponents_plain};
  return kernels;
}

}  // namespace arb
