// Instructions that TileLang has no name for. CUDA has them as intrinsics; C++ restates them.
// A word holds four bytes or two int16, the first in the lowest bits.
#include <cstdint>
#ifdef __CUDACC__
#define ARB_CALL static __device__ __forceinline__
#else
#include <algorithm>
#include <cmath>
#define ARB_CALL extern "C" inline
#endif

// Four of the eight bytes of two words, chosen by the hexadecimal digits of `selector`. A digit from
// 8 up stands for the sign of byte `digit - 8`, repeated.
ARB_CALL uint32_t arb_pick(uint32_t low, uint32_t high, uint32_t selector) {
#ifdef __CUDACC__
  uint32_t picked;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(picked) : "r"(low), "r"(high), "r"(selector));
  return picked;
#else
  uint64_t both = (uint64_t)high << 32 | low;
  uint32_t picked = 0;
  for (int place = 0; place < 4; ++place) {
    uint32_t digit = selector >> 4 * place & 15;
    int8_t byte = (int8_t)(both >> 8 * (digit & 7));
    if (digit > 7) byte = byte < 0 ? -1 : 0;
    picked |= (uint32_t)(uint8_t)byte << 8 * place;
  }
  return picked;
#endif
}

// `left * right + more` with one rounding.
ARB_CALL float arb_fused(float left, float right, float more) {
#ifdef __CUDACC__
  return __fmaf_rn(left, right, more);
#else
  return std::fma(left, right, more);
#endif
}

// `|value|`.
ARB_CALL float arb_magnitude(float value) { return fabsf(value); }

// `number * 2**-24`.
ARB_CALL float arb_fraction(uint32_t number) { return (float)number * 0x1p-24f; }

// `value` plus the noise of a hash, which lies around one half and is as wide as `2**-noise_shift`.
ARB_CALL float arb_plus_noise(float value, uint32_t hash, int32_t noise_shift) {
  uint32_t drawn = hash & 0xFFFFFF00u << noise_shift;
  uint32_t least = ((1 << 24) - (1 << (24 - noise_shift))) >> 1;
#ifdef __CUDACC__
  float unit = __int_as_float((95 - noise_shift) << 23);
#else
  float unit = std::ldexp(0x1p-32f, -noise_shift);
#endif
  // The noise is a multiple of 2**-24 below 1, so that its sum is exact.
  return value + arb_fused((float)drawn, unit, arb_fraction(least));
}

// `value` in -largest..largest; NaN stays NaN.
ARB_CALL float arb_clip(float value, float largest) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 860
  float clipped;
  asm("min.NaN.xorsign.abs.f32 %0, %1, %2;" : "=f"(clipped) : "f"(value), "f"(largest));
  return clipped;
#elif defined(__CUDACC__)
  float clipped;
  asm("{ .reg .f32 raised; max.NaN.f32 raised, %1, %3; min.NaN.f32 %0, raised, %2; }"
      : "=f"(clipped) : "f"(value), "f"(largest), "f"(-largest));
  return clipped;
#else
  return value > largest ? largest : value < -largest ? -largest : value;
#endif
}

// The smallest integer that is not below `value`; 0 of NaN.
ARB_CALL int32_t arb_ceil(float value) {
#ifdef __CUDACC__
  return __float2int_ru(value);
#else
  return value == value ? (int32_t)std::ceil(value) : 0;
#endif
}

// `left + right` in 0..31.
ARB_CALL int32_t arb_shift(int32_t left, int32_t right) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  return __viaddmin_s32_relu(left, right, 31);
#elif defined(__CUDACC__)
  return max(min(left + right, 31), 0);
#else
  return std::max(std::min(left + right, 31), 0);
#endif
}

// `sum + a0 * b0 + a1 * b1 + a2 * b2 + a3 * b3` of signed bytes `a` and unsigned bytes `b`.
ARB_CALL int32_t arb_dot(uint32_t a, uint32_t b, int32_t sum) {
#ifdef __CUDACC__
  int32_t added;
  asm("dp4a.s32.u32 %0, %1, %2, %3;" : "=r"(added) : "r"(a), "r"(b), "r"(sum));
  return added;
#else
  for (int place = 0; place < 32; place += 8)
    sum += (int8_t)(a >> place) * (int32_t)(uint8_t)(b >> place);
  return sum;
#endif
}

// The low bytes of four numbers.
ARB_CALL uint32_t arb_bytes(int32_t n0, int32_t n1, int32_t n2, int32_t n3) {
  return arb_pick(arb_pick(n0, n1, 0x5410), arb_pick(n2, n3, 0x5410), 0x6420);
}

// Four accumulators and what is added to each, in `lowest`..127.
ARB_CALL uint32_t arb_moved(uint32_t four, int32_t m0, int32_t m1, int32_t m2, int32_t m3,
                            int32_t lowest) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  uint32_t low = (lowest & 0xFFFF) * 0x00010001;
  uint32_t m_01 = arb_pick(m0, m1, 0x5410);
  uint32_t m_23 = arb_pick(m2, m3, 0x5410);
  uint32_t left_01 = __viaddmin_s16x2(arb_pick(four, 0, 0x9180), m_01, 0x007F007F);
  uint32_t left_23 = __viaddmin_s16x2(arb_pick(four, 0, 0xB3A2), m_23, 0x007F007F);
  return arb_pick(__vmaxs2(left_01, low), __vmaxs2(left_23, low), 0x6420);
#else
  int32_t left[4] = {m0, m1, m2, m3};
  for (int i = 0; i < 4; ++i) {
    left[i] += (int8_t)(four >> 8 * i);
    left[i] = left[i] > 127 ? 127 : left[i] < lowest ? lowest : left[i];
  }
  return arb_bytes(left[0], left[1], left[2], left[3]);
#endif
}

// The magnitudes of four accumulators.
ARB_CALL uint32_t arb_magnitudes(uint32_t four) {
#ifdef __CUDACC__
  return __vabsdiffs4(four, 0);
#else
  uint32_t negative = arb_pick(four, 0, 0xBA98);
  return (four ^ negative) + (negative & 0x01010101);
#endif
}

// 128 plus `byte * (65536 - rate) / 65536`, rounded by `mixed`, times 65536. The byte is byte `place`
// of `sizes`, and `mixed` the hash without its last step.
ARB_CALL uint32_t arb_decayed(uint32_t sizes, int32_t place, int32_t rate, uint32_t mixed) {
  // Half by half the hash is `x ^ (x >> 16)`, and here 0 above.
  uint32_t noise = mixed ^ arb_pick(mixed, 0, 0x3232) ^ 0x0080FFFF;
  uint32_t kept = 65536 - rate;
#ifdef __CUDACC__
  uint32_t placed = place & 1 ? kept << 16 : kept;
  return place & 2 ? __dp2a_hi(placed, sizes, noise) : __dp2a_lo(placed, sizes, noise);
#else
  return noise + kept * (sizes >> 8 * place & 255);
#endif
}

// 128 plus what is left of sizes of at most 127, each less by `rate`, but for those below it.
ARB_CALL uint32_t arb_leaked(uint32_t sizes, int32_t rate) {
  uint32_t less = rate < 127 ? rate : 127;
  uint32_t left = (sizes | 0x80808080) - less * 0x01010101;
  uint32_t positive = left & 0x80808080;
  return (left & (positive - (positive >> 7))) | 0x80808080;
}

// Four accumulators with other sizes, to each of which 128 was added.
ARB_CALL uint32_t arb_resized(uint32_t four, uint32_t raised) {
  uint32_t negative = arb_pick(four, 0, 0xBA98);
  uint32_t opposite = 0x01010100 - raised;
  return ((opposite & negative) | (raised & ~negative)) ^ 0x80808080;
}
