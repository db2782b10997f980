// Votes with AVX2 and the int8 dot products of AVX-VNNI.
#include "votes_ymm_rows.h"

namespace arb {
namespace {

void multiply_int8(const int8_t* panel, const uint8_t* strip, int64_t steps, const int32_t* start, int32_t* c,
                   int64_t ldc) {
  for (int64_t k = 0; k < kStripColumns; k += 16) {
    __m256i sum[kPanelRows][2];
#pragma GCC unroll 6
    for (int r = 0; r < kPanelRows; ++r) {
      sum[r][0] = start != nullptr ? _mm256_set1_epi32(start[r]) : load_ymm(c + r * ldc + k);
      sum[r][1] = start != nullptr ? sum[r][0] : load_ymm(c + r * ldc + k + 8);
    }
    const int8_t* g = panel;
    const uint8_t* x = strip + 4 * k;
    for (int64_t s = 0; s < steps; ++s, g += 4 * kPanelRows, x += kStepBytes) {
      const __m256i x0 = load_ymm(x), x1 = load_ymm(x + 32);
#pragma GCC unroll 6
      for (int r = 0; r < kPanelRows; ++r) {
        const __m256i row = _mm256_set1_epi32(static_cast<int32_t>(load32(g + 4 * r)));
        sum[r][0] = _mm256_dpbusd_avx_epi32(sum[r][0], x0, row);
        sum[r][1] = _mm256_dpbusd_avx_epi32(sum[r][1], x1, row);
      }
    }
#pragma GCC unroll 6
    for (int r = 0; r < kPanelRows; ++r) {
      store_ymm(c + r * ldc + k, sum[r][0]);
      store_ymm(c + r * ldc + k + 8, sum[r][1]);
    }
  }
}

}  // namespace

const VoteKernels& vote_kernels_avxvnni() {
  static constexpr VoteKernels kernels = {0x80,
                                          multiply_int8,
                                          multiply_float_ymm,
                                          interleave_ymm,
                                          sum_panel_plain,
                                          4 * kPanelRows,
                                          plan_shifts,
                                          {vote_float_ymm, vote_int32_ymm, vote_int64_plain},
                                          cast_ymm,
                                          flip_ymm,
                                          settle_plain,
                                          move_exponents_plain};
  return kernels;
}

}  // namespace arb
