// Sixteen lanes of 32 bits in four registers: NEON with dot products.
#pragma once

#include <arm_neon.h>

#include <cstdint>
#include <cstring>

namespace arb {
namespace {

struct V {
  int32x4_t q[4];
};
struct F {
  float32x4_t q[4];
};

constexpr int64_t kTileStrips = 1;
constexpr int64_t kTileRows = 6;
constexpr int64_t kTileRowsFloat = 6;
constexpr int64_t kFewRows = 1;
// The dot product is signed on both sides: nothing is flipped, and bit planes are shifted down before they are used.
constexpr uint8_t kFlip = 0;
constexpr bool kUnsignedCodes = false;

template <class Op>
inline V quarters(Op op) {
  return {{op(0), op(1), op(2), op(3)}};
}
template <class Op>
inline F quartersf(Op op) {
  return {{op(0), op(1), op(2), op(3)}};
}

inline V load(const void* p) {
  const int8_t* from = static_cast<const int8_t*>(p);
  return quarters([&](int i) { return vreinterpretq_s32_s8(vld1q_s8(from + 16 * i)); });
}
inline void store(void* p, V v) {
  for (int i = 0; i < 4; ++i) vst1q_s8(static_cast<int8_t*>(p) + 16 * i, vreinterpretq_s8_s32(v.q[i]));
}
inline V splat(int32_t x) {
  return quarters([&](int) { return vdupq_n_s32(x); });
}
inline V zero() { return splat(0); }
inline V add(V a, V b) {
  return quarters([&](int i) { return vaddq_s32(a.q[i], b.q[i]); });
}
inline V sub(V a, V b) {
  return quarters([&](int i) { return vsubq_s32(a.q[i], b.q[i]); });
}
inline V mul(V a, V b) {
  return quarters([&](int i) { return vmulq_s32(a.q[i], b.q[i]); });
}
inline V bit_and(V a, V b) {
  return quarters([&](int i) { return vandq_s32(a.q[i], b.q[i]); });
}
inline V bit_or(V a, V b) {
  return quarters([&](int i) { return vorrq_s32(a.q[i], b.q[i]); });
}
inline V bit_xor(V a, V b) {
  return quarters([&](int i) { return veorq_s32(a.q[i], b.q[i]); });
}
inline V select_bits(V a, V mask, V bits) { return bit_or(bit_and(a, mask), bits); }
template <int N>
inline V shift_left(V a) {
  return quarters([&](int i) { return vshlq_n_s32(a.q[i], N); });
}
template <int N>
inline V shift_right(V a) {
  return quarters(
      [&](int i) { return vreinterpretq_s32_u32(vshlq_u32(vreinterpretq_u32_s32(a.q[i]), vdupq_n_s32(-N))); });
}
template <int N>
inline V shift_right_signed(V a) {
  return quarters([&](int i) { return vshlq_s32(a.q[i], vdupq_n_s32(-N)); });
}
// The instruction takes the low byte of the count as a signed number; one of 32 or more, or of less than 0, gives 0
// here.
inline int32x4_t in_range(int32x4_t shifted, int32x4_t count) {
  return vandq_s32(shifted, vreinterpretq_s32_u32(vcltq_u32(vreinterpretq_u32_s32(count), vdupq_n_u32(32))));
}
inline V shift_left(V a, V count) {
  return quarters([&](int i) { return in_range(vshlq_s32(a.q[i], count.q[i]), count.q[i]); });
}
inline V shift_right(V a, V count) {
  return quarters([&](int i) {
    const uint32x4_t shifted = vshlq_u32(vreinterpretq_u32_s32(a.q[i]), vnegq_s32(count.q[i]));
    return in_range(vreinterpretq_s32_u32(shifted), count.q[i]);
  });
}
inline V max_signed(V a, V b) {
  return quarters([&](int i) { return vmaxq_s32(a.q[i], b.q[i]); });
}
inline V min_signed(V a, V b) {
  return quarters([&](int i) { return vminq_s32(a.q[i], b.q[i]); });
}
inline V choose_greater(V a, V limit, V yes, V no) {
  return quarters([&](int i) { return vbslq_s32(vcgtq_s32(a.q[i], limit.q[i]), yes.q[i], no.q[i]); });
}
inline V min_bytes(V a, V b) {
  return quarters([&](int i) {
    return vreinterpretq_s32_s8(vminq_s8(vreinterpretq_s8_s32(a.q[i]), vreinterpretq_s8_s32(b.q[i])));
  });
}
inline V max_bytes(V a, V b) {
  return quarters([&](int i) {
    return vreinterpretq_s32_s8(vmaxq_s8(vreinterpretq_s8_s32(a.q[i]), vreinterpretq_s8_s32(b.q[i])));
  });
}
inline V widen_u16(const void* p) {
  const uint8_t* from = static_cast<const uint8_t*>(p);
  return quarters([&](int i) { return vreinterpretq_s32_u32(vmovl_u16(vreinterpret_u16_u8(vld1_u8(from + 8 * i)))); });
}
inline V widen_u8(const void* p) {
  const uint8x16_t bytes = vld1q_u8(static_cast<const uint8_t*>(p));
  const uint16x8_t low = vmovl_u8(vget_low_u8(bytes)), high = vmovl_u8(vget_high_u8(bytes));
  return {{vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(low))), vreinterpretq_s32_u32(vmovl_u16(vget_high_u16(low))),
           vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(high))),
           vreinterpretq_s32_u32(vmovl_u16(vget_high_u16(high)))}};
}
inline V widen_i8(const void* p) {
  const int8x16_t bytes = vld1q_s8(static_cast<const int8_t*>(p));
  const int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_s8(vget_high_s8(bytes));
  return {{vmovl_s16(vget_low_s16(low)), vmovl_s16(vget_high_s16(low)), vmovl_s16(vget_low_s16(high)),
           vmovl_s16(vget_high_s16(high))}};
}
inline int16x8_t narrow_pair(int32x4_t a, int32x4_t b) { return vcombine_s16(vmovn_s32(a), vmovn_s32(b)); }
inline void narrow_8(void* p, V v) {
  const int8x8_t low = vmovn_s16(narrow_pair(v.q[0], v.q[1])), high = vmovn_s16(narrow_pair(v.q[2], v.q[3]));
  vst1q_s8(static_cast<int8_t*>(p), vcombine_s8(low, high));
}
inline void narrow_16(void* p, V v) {
  vst1q_s8(static_cast<int8_t*>(p), vreinterpretq_s8_s16(narrow_pair(v.q[0], v.q[1])));
  vst1q_s8(static_cast<int8_t*>(p) + 16, vreinterpretq_s8_s16(narrow_pair(v.q[2], v.q[3])));
}

inline V dot(V acc, V w, V x) {
  return quarters(
      [&](int i) { return vdotq_s32(acc.q[i], vreinterpretq_s8_s32(w.q[i]), vreinterpretq_s8_s32(x.q[i])); });
}
inline V dot_codes(V acc, V codes, V x) { return dot(acc, codes, x); }
inline V lookup(V table, V index) {
  return quarters([&](int i) {
    return vreinterpretq_s32_s8(vqtbl1q_s8(vreinterpretq_s8_s32(table.q[i]), vreinterpretq_u8_s32(index.q[i])));
  });
}
inline V transpose_bytes(V v) {
  const uint8x16_t order = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
  return quarters([&](int i) { return vreinterpretq_s32_s8(vqtbl1q_s8(vreinterpretq_s8_s32(v.q[i]), order)); });
}
inline void transpose_quarters(const V in[4], V out[4]) {
  for (int q = 0; q < 4; ++q) out[q] = quarters([&](int p) { return in[p].q[q]; });
}
// Sixteen rows of 16 bytes, `stride` apart: lane r of out[i] is bytes 4i .. 4i + 3 of row r.
inline void load_columns(const int8_t* p, int64_t stride, V out[4]) {
  alignas(64) int8_t columns[4][64];
  for (int r = 0; r < 16; ++r) {
    for (int i = 0; i < 4; ++i) std::memcpy(columns[i] + 4 * r, p + r * stride + 4 * i, 4);
  }
  for (int i = 0; i < 4; ++i) out[i] = load(columns[i]);
}
inline int32_t reduce_max(V v) { return vmaxvq_s32(vmaxq_s32(vmaxq_s32(v.q[0], v.q[1]), vmaxq_s32(v.q[2], v.q[3]))); }

inline F as_float(V v) {
  return quartersf([&](int i) { return vreinterpretq_f32_s32(v.q[i]); });
}
inline V as_bits(F f) {
  return quarters([&](int i) { return vreinterpretq_s32_f32(f.q[i]); });
}
inline F to_float(V v) {
  return quartersf([&](int i) { return vcvtq_f32_s32(v.q[i]); });
}
inline V to_int(F f) {
  return quarters([&](int i) { return vcvtnq_s32_f32(f.q[i]); });
}
inline F loadf(const float* p) {
  return quartersf([&](int i) { return vld1q_f32(p + 4 * i); });
}
inline F load_quarters(const float* a, const float* b, const float* c, const float* d) {
  return {{vld1q_f32(a), vld1q_f32(b), vld1q_f32(c), vld1q_f32(d)}};
}
inline F load_halves(const float* a, const float* b) { return load_quarters(a, a + 4, b, b + 4); }
inline void storef(float* p, F f) {
  for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, f.q[i]);
}
inline F splatf(float x) {
  return quartersf([&](int) { return vdupq_n_f32(x); });
}
inline F addf(F a, F b) {
  return quartersf([&](int i) { return vaddq_f32(a.q[i], b.q[i]); });
}
inline F mulf(F a, F b) {
  return quartersf([&](int i) { return vmulq_f32(a.q[i], b.q[i]); });
}
inline F divf(F a, F b) {
  return quartersf([&](int i) { return vdivq_f32(a.q[i], b.q[i]); });
}
// 1 / a, up to two roundings, for 1 / a that is normal.
inline F reciprocal(F a) { return divf(splatf(1.0f), a); }
inline F fma(F a, F b, F c) {
  return quartersf([&](int i) { return vfmaq_f32(c.q[i], a.q[i], b.q[i]); });
}
inline float reduce_sum(F a) {
  const float32x4_t four = vaddq_f32(vaddq_f32(a.q[0], a.q[2]), vaddq_f32(a.q[1], a.q[3]));
  const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
  return vget_lane_f32(vpadd_f32(two, two), 0);
}
inline void reduce_sums(const F from[4], float sums[4]) {
  float32x4_t four[4];
  for (int i = 0; i < 4; ++i) {
    four[i] = vaddq_f32(vaddq_f32(from[i].q[0], from[i].q[2]), vaddq_f32(from[i].q[1], from[i].q[3]));
  }
  vst1q_f32(sums, vpaddq_f32(vpaddq_f32(four[0], four[1]), vpaddq_f32(four[2], four[3])));
}
inline F floorf16(F a) {
  return quartersf([&](int i) { return vrndmq_f32(a.q[i]); });
}
inline V floor_to_int(F a) { return to_int(floorf16(a)); }
inline F clampf(F a, F low, F high) {
  return quartersf([&](int i) { return vminq_f32(high.q[i], vmaxq_f32(low.q[i], a.q[i])); });
}
inline F load_half(const void* p) {
  const uint8_t* from = static_cast<const uint8_t*>(p);
  return quartersf([&](int i) { return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(from + 8 * i))); });
}
inline void store_half(void* p, F f) {
  for (int i = 0; i < 4; ++i) {
    vst1_u8(static_cast<uint8_t*>(p) + 8 * i, vreinterpret_u8_f16(vcvt_f16_f32(f.q[i])));
  }
}

// Inlined at once, because gcc takes a function that only prefetches for one without effect.
[[gnu::always_inline]] inline void prefetch(const void* p) { __builtin_prefetch(p); }
// Into the second-level cache: more of these may be under way.
[[gnu::always_inline]] inline void prefetch_far(const void* p) { __builtin_prefetch(p, 0, 2); }

}  // namespace
}  // namespace arb
