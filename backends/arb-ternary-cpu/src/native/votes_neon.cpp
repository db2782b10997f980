// Votes with the dot products of ARMv8.2.
#include <arm_neon.h>

#include "votes_rows.h"

namespace arb {
namespace {

void interleave(const int8_t* const rows[4], uint8_t flip, uint8_t* step) {
  const uint8x16_t bits = vdupq_n_u8(flip);
  for (int64_t c = 0; c < kStripColumns; c += 16) {
    uint8x16x4_t four;
    for (int i = 0; i < 4; ++i) four.val[i] = veorq_u8(vreinterpretq_u8_s8(vld1q_s8(rows[i] + c)), bits);
    vst4q_u8(step + 4 * c, four);
  }
}

// 6 rows x 16 columns at a time: 24 accumulators, 4 vectors of activations and 2 of the gradient of 32 registers.
constexpr int kVectors = 4;

void multiply_int8(const int8_t* panel, const uint8_t* strip, int64_t steps, const int32_t* start, int32_t* c,
                   int64_t ldc) {
  for (int64_t k = 0; k < kStripColumns; k += 16) {
    int32x4_t sum[kPanelRows][kVectors];
    for (int r = 0; r < kPanelRows; ++r) {
      for (int j = 0; j < kVectors; ++j) {
        sum[r][j] = start != nullptr ? vdupq_n_s32(start[r]) : vld1q_s32(c + r * ldc + k + 4 * j);
      }
    }
    const int8_t* g = panel;
    const int8_t* x = reinterpret_cast<const int8_t*>(strip) + 4 * k;
    for (int64_t s = 0; s < steps; ++s, g += 4 * kPanelRows, x += kStepBytes) {
      const int8x16_t low = vld1q_s8(g);
      const int8x8_t high = vld1_s8(g + 16);
      for (int j = 0; j < kVectors; ++j) {
        const int8x16_t four = vld1q_s8(x + 16 * j);
        sum[0][j] = vdotq_laneq_s32(sum[0][j], four, low, 0);
        sum[1][j] = vdotq_laneq_s32(sum[1][j], four, low, 1);
        sum[2][j] = vdotq_laneq_s32(sum[2][j], four, low, 2);
        sum[3][j] = vdotq_laneq_s32(sum[3][j], four, low, 3);
        sum[4][j] = vdotq_lane_s32(sum[4][j], four, high, 0);
        sum[5][j] = vdotq_lane_s32(sum[5][j], four, high, 1);
      }
    }
    for (int r = 0; r < kPanelRows; ++r) {
      for (int j = 0; j < kVectors; ++j) vst1q_s32(c + r * ldc + k + 4 * j, sum[r][j]);
    }
  }
}

void multiply_float(const float* panel, const float* strip, int64_t steps, bool fresh, float* c, int64_t ldc) {
  for (int64_t k = 0; k < kStripColumns; k += 16) {
    float32x4_t sum[kPanelRows][kVectors];
    for (int r = 0; r < kPanelRows; ++r) {
      for (int j = 0; j < kVectors; ++j) {
        sum[r][j] = fresh ? vdupq_n_f32(0.0f) : vld1q_f32(c + r * ldc + k + 4 * j);
      }
    }
    const float* g = panel;
    const float* x = strip + k;
    for (int64_t s = 0; s < steps; ++s, g += kPanelRows, x += kStripColumns) {
      const float32x4_t low = vld1q_f32(g);
      const float32x2_t high = vld1_f32(g + 4);
      for (int j = 0; j < kVectors; ++j) {
        const float32x4_t four = vld1q_f32(x + 4 * j);
        sum[0][j] = vfmaq_laneq_f32(sum[0][j], four, low, 0);
        sum[1][j] = vfmaq_laneq_f32(sum[1][j], four, low, 1);
        sum[2][j] = vfmaq_laneq_f32(sum[2][j], four, low, 2);
        sum[3][j] = vfmaq_laneq_f32(sum[3][j], four, low, 3);
        sum[4][j] = vfmaq_lane_f32(sum[4][j], four, high, 0);
        sum[5][j] = vfmaq_lane_f32(sum[5][j], four, high, 1);
      }
    }
    for (int r = 0; r < kPanelRows; ++r) {
      for (int j = 0; j < kVectors; ++j) vst1q_f32(c + r * ldc + k + 4 * j, sum[r][j]);
    }
  }
}

}  // namespace

const VoteKernels& vote_kernels_neon() {
  static constexpr VoteKernels kernels = {0,
                                          multiply_int8,
                                          multiply_float,
                                          interleave,
                                          sum_panel_plain,
                                          4 * kPanelRows,
                                          plan_shifts,
                                          {vote_float, vote_int32_plain, vote_int64_plain},
                                          cast_plain,
                                          flip_plain,
                                          settle_plain,
                                          move_exponents_plain};
  return kernels;
}

}  // namespace arb
