// Sixteen lanes of 32 bits in plain C++, for any processor.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace arb {
namespace {

struct V {
  int32_t v[16];
};
struct F {
  float f[16];
};

constexpr int64_t kTileStrips = 1;
constexpr int64_t kTileRows = 1;
constexpr int64_t kTileRowsFloat = 1;
constexpr int64_t kFewRows = 1;
constexpr uint8_t kFlip = 0;
constexpr bool kUnsignedCodes = true;

template <class Op>
inline V lanes(Op op) {
  V out;
  for (int i = 0; i < 16; ++i) out.v[i] = static_cast<int32_t>(op(i));
  return out;
}
template <class Op>
inline F lanesf(Op op) {
  F out;
  for (int i = 0; i < 16; ++i) out.f[i] = op(i);
  return out;
}
inline uint32_t bits(int32_t x) { return static_cast<uint32_t>(x); }

inline V load(const void* p) {
  V out;
  std::memcpy(out.v, p, sizeof out.v);
  return out;
}
inline void store(void* p, V v) { std::memcpy(p, v.v, sizeof v.v); }
inline V splat(int32_t x) {
  return lanes([&](int) { return x; });
}
inline V zero() { return splat(0); }
// Unsigned on the inside: sums wrap around, as they do in registers.
inline V add(V a, V b) {
  return lanes([&](int i) { return bits(a.v[i]) + bits(b.v[i]); });
}
inline V sub(V a, V b) {
  return lanes([&](int i) { return bits(a.v[i]) - bits(b.v[i]); });
}
inline V mul(V a, V b) {
  return lanes([&](int i) { return bits(a.v[i]) * bits(b.v[i]); });
}
inline V bit_and(V a, V b) {
  return lanes([&](int i) { return a.v[i] & b.v[i]; });
}
inline V bit_or(V a, V b) {
  return lanes([&](int i) { return a.v[i] | b.v[i]; });
}
inline V bit_xor(V a, V b) {
  return lanes([&](int i) { return a.v[i] ^ b.v[i]; });
}
inline V select_bits(V a, V mask, V set) { return bit_or(bit_and(a, mask), set); }
template <int N>
inline V shift_left(V a) {
  return lanes([&](int i) { return bits(a.v[i]) << N; });
}
template <int N>
inline V shift_right(V a) {
  return lanes([&](int i) { return bits(a.v[i]) >> N; });
}
template <int N>
inline V shift_right_signed(V a) {
  return lanes([&](int i) { return a.v[i] >> N; });
}
inline V shift_left(V a, V count) {
  return lanes([&](int i) { return bits(count.v[i]) < 32 ? bits(a.v[i]) << count.v[i] : 0u; });
}
inline V shift_right(V a, V count) {
  return lanes([&](int i) { return bits(count.v[i]) < 32 ? bits(a.v[i]) >> count.v[i] : 0u; });
}
inline V max_signed(V a, V b) {
  return lanes([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
inline V min_signed(V a, V b) {
  return lanes([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
}
inline V choose_greater(V a, V limit, V yes, V no) {
  return lanes([&](int i) { return a.v[i] > limit.v[i] ? yes.v[i] : no.v[i]; });
}
template <bool Largest>
inline V extreme_bytes(V a, V b) {
  int8_t x[64], y[64];
  std::memcpy(x, a.v, 64);
  std::memcpy(y, b.v, 64);
  for (int i = 0; i < 64; ++i) x[i] = (x[i] > y[i]) == Largest ? x[i] : y[i];
  std::memcpy(a.v, x, 64);
  return a;
}
inline V min_bytes(V a, V b) { return extreme_bytes<false>(a, b); }
inline V max_bytes(V a, V b) { return extreme_bytes<true>(a, b); }
inline V widen_u8(const void* p) {
  return lanes([&](int i) { return static_cast<const uint8_t*>(p)[i]; });
}
inline V widen_i8(const void* p) {
  return lanes([&](int i) { return static_cast<const int8_t*>(p)[i]; });
}
inline V widen_u16(const void* p) {
  uint16_t words[16];
  std::memcpy(words, p, sizeof words);
  return lanes([&](int i) { return words[i]; });
}
inline void narrow_8(void* p, V v) {
  for (int i = 0; i < 16; ++i) static_cast<uint8_t*>(p)[i] = static_cast<uint8_t>(v.v[i]);
}
inline void narrow_16(void* p, V v) {
  uint16_t words[16];
  for (int i = 0; i < 16; ++i) words[i] = static_cast<uint16_t>(v.v[i]);
  std::memcpy(p, words, sizeof words);
}

inline V dot(V acc, V w, V x) {
  int8_t a[64], b[64];
  std::memcpy(a, w.v, 64);
  std::memcpy(b, x.v, 64);
  for (int i = 0; i < 16; ++i) {
    int32_t sum = 0;
    for (int j = 4 * i; j < 4 * i + 4; ++j) sum += static_cast<int32_t>(a[j]) * b[j];
    acc.v[i] = static_cast<int32_t>(bits(acc.v[i]) + bits(sum));
  }
  return acc;
}
inline V dot_codes(V acc, V codes, V x) {
  uint8_t a[64];
  int8_t b[64];
  std::memcpy(a, codes.v, 64);
  std::memcpy(b, x.v, 64);
  for (int i = 0; i < 16; ++i) {
    int32_t sum = 0;
    for (int j = 4 * i; j < 4 * i + 4; ++j) sum += static_cast<int32_t>(a[j]) * b[j];
    acc.v[i] = static_cast<int32_t>(bits(acc.v[i]) + bits(sum));
  }
  return acc;
}
inline V lookup(V table, V index) {
  uint8_t from[64], at[64], to[64];
  std::memcpy(from, table.v, 64);
  std::memcpy(at, index.v, 64);
  for (int i = 0; i < 64; ++i) to[i] = from[(i & 48) + (at[i] & 15)];
  V out;
  std::memcpy(out.v, to, 64);
  return out;
}
inline V transpose_bytes(V v) {
  uint8_t from[64], to[64];
  std::memcpy(from, v.v, 64);
  for (int i = 0; i < 64; ++i) to[i] = from[(i & 48) + ((i & 3) << 2) + ((i >> 2) & 3)];
  V out;
  std::memcpy(out.v, to, 64);
  return out;
}
inline void transpose_quarters(const V in[4], V out[4]) {
  for (int q = 0; q < 4; ++q) {
    for (int p = 0; p < 4; ++p) std::memcpy(out[q].v + 4 * p, in[p].v + 4 * q, 16);
  }
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
  int32_t most = v.v[0];
  for (int i = 1; i < 16; ++i) most = v.v[i] > most ? v.v[i] : most;
  return most;
}

inline F as_float(V v) {
  F out;
  std::memcpy(out.f, v.v, sizeof out.f);
  return out;
}
inline V as_bits(F f) {
  V out;
  std::memcpy(out.v, f.f, sizeof out.v);
  return out;
}
inline F to_float(V v) {
  return lanesf([&](int i) { return static_cast<float>(v.v[i]); });
}
inline V to_int(F f) {
  return lanes([&](int i) {
    const float x = f.f[i];
    return x >= -2147483648.0f && x < 2147483648.0f ? static_cast<int32_t>(std::nearbyintf(x)) : INT32_MIN;
  });
}
inline F loadf(const float* p) {
  F out;
  std::memcpy(out.f, p, sizeof out.f);
  return out;
}
inline F load_quarters(const float* a, const float* b, const float* c, const float* d) {
  const float* const quarters[4] = {a, b, c, d};
  return lanesf([&](int i) { return quarters[i / 4][i % 4]; });
}
inline F load_halves(const float* a, const float* b) { return load_quarters(a, a + 4, b, b + 4); }
inline void storef(float* p, F f) { std::memcpy(p, f.f, sizeof f.f); }
inline F splatf(float x) {
  return lanesf([&](int) { return x; });
}
inline F addf(F a, F b) {
  return lanesf([&](int i) { return a.f[i] + b.f[i]; });
}
inline F mulf(F a, F b) {
  return lanesf([&](int i) { return a.f[i] * b.f[i]; });
}
inline F divf(F a, F b) {
  return lanesf([&](int i) { return a.f[i] / b.f[i]; });
}
// 1 / a, up to two roundings, for 1 / a that is normal.
inline F reciprocal(F a) { return divf(splatf(1.0f), a); }
inline F fma(F a, F b, F c) {
  return lanesf([&](int i) { return a.f[i] * b.f[i] + c.f[i]; });  // two roundings: a library call would be far slower
}
// In halves, as registers are folded.
inline float reduce_sum(F a) {
  for (int width = 8; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) a.f[i] += a.f[i + width];
  }
  return a.f[0];
}
// The sums of four.
inline void reduce_sums(const F from[4], float sums[4]) {
  for (int i = 0; i < 4; ++i) sums[i] = reduce_sum(from[i]);
}
inline F floorf16(F a) {
  return lanesf([&](int i) { return std::floor(a.f[i]); });
}
inline V floor_to_int(F a) { return to_int(floorf16(a)); }
inline F clampf(F a, F low, F high) {
  return lanesf([&](int i) { return a.f[i] < low.f[i] ? low.f[i] : (a.f[i] > high.f[i] ? high.f[i] : a.f[i]); });
}

inline float half_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t rest = half & 0x7FFFu;
  uint32_t word;
  if (rest >= 0x7C00u) {
    word = (rest << 13) | 0x7F800000u;
  } else {
    // As a float of exponent 2**-112 of the true one; the product rescales, exactly, subnormal numbers included.
    const uint32_t scaled = rest << 13;
    float value;
    std::memcpy(&value, &scaled, 4);
    value *= 0x1p112f;
    std::memcpy(&word, &value, 4);
  }
  word |= sign;
  float out;
  std::memcpy(&out, &word, 4);
  return out;
}
inline uint16_t float_to_half(float value) {
  uint32_t word;
  std::memcpy(&word, &value, 4);
  const uint32_t sign = (word >> 16) & 0x8000u;
  word &= 0x7FFFFFFFu;
  if (word > 0x7F800000u) return static_cast<uint16_t>(sign | 0x7E00u | ((word >> 13) & 0x3FFu));
  if (word >= 0x477FF000u) return static_cast<uint16_t>(sign | 0x7C00u);  // rounds to 2**16 or more
  if (word < 0x38800000u) {  // subnormal: the addition leaves units of 2**-24, rounded to nearest even, in the low bits
    float magnitude;
    std::memcpy(&magnitude, &word, 4);
    magnitude += 0.5f;
    std::memcpy(&word, &magnitude, 4);
    return static_cast<uint16_t>(sign | (word - 0x3F000000u));
  }
  const uint32_t odd = (word >> 13) & 1u;
  return static_cast<uint16_t>(sign | ((word - 0x38000000u + 0xFFFu + odd) >> 13));
}
inline F load_half(const void* p) {
  uint16_t halves[16];
  std::memcpy(halves, p, sizeof halves);
  return lanesf([&](int i) { return half_to_float(halves[i]); });
}
inline void store_half(void* p, F f) {
  uint16_t halves[16];
  for (int i = 0; i < 16; ++i) halves[i] = float_to_half(f.f[i]);
  std::memcpy(p, halves, sizeof halves);
}

// Inlined at once, because gcc takes a function that only prefetches for one without effect.
[[gnu::always_inline]] inline void prefetch(const void*) {}
[[gnu::always_inline]] inline void prefetch_far(const void*) {}

}  // namespace
}  // namespace arb
