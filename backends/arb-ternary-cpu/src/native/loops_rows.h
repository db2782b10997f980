// Rows: quantisation, the fused norm, stochastic rounding, lookup.
#pragma once

#include "hash.h"
#include "loops_rounding.h"

namespace arb {
namespace {

// The low bytes of sixteen lanes, or of `count`.
inline void store_bytes(int8_t* q, V lanes, int64_t count) {
  if (count >= 16) return narrow_8(q, lanes);
  int8_t whole[16];
  narrow_8(whole, lanes);
  std::memcpy(q, whole, static_cast<size_t>(count));
}

float quantize_floats(const void* x, Dtype dtype, int64_t count, int8_t* q) {
  V most = zero();
  for (int64_t k = 0; k < count; k += 16) {
    most = max_signed(most, magnitude_bits(load_floats(element(x, dtype, k), dtype, count - k)));
  }
  const int32_t bits = reduce_max(most);
  float largest;
  std::memcpy(&largest, &bits, 4);
  const float scale = largest / 127.0f;
  if (scale == 0.0f || bits >= kInfinityBits) {
    std::memset(q, 0, static_cast<size_t>(count));
    return scale;
  }
  const F divisor = splatf(scale);
  const Rounding rounding(divisor);
  V worst = zero();
  for (int64_t k = 0; k < count; k += 16) {
    store_bytes(q + k, rounding.quick(load_floats(element(x, dtype, k), dtype, count - k), worst), count - k);
  }
  if (rounding.certain(worst)) return scale;
  for (int64_t k = 0; k < count; k += 16) {
    // With a subnormal scale a quotient may exceed 127; its low byte is kept, as a conversion to int8 does.
    store_bytes(q + k, to_int(divf(load_floats(element(x, dtype, k), dtype, count - k), divisor)), count - k);
  }
  return scale;
}

float quantize_row(const void* x, Dtype dtype, int64_t count, int8_t* q) { return quantize_floats(x, dtype, count, q); }

float norm_quantize_row(const void* x, Dtype dtype, int64_t count, float eps, float* work, int8_t* q) {
  F squares = splatf(0.0f);
  for (int64_t k = 0; k < count; k += 16) {
    const F f = load_floats(element(x, dtype, k), dtype, count - k);
    squares = addf(squares, mulf(f, f));
  }
  alignas(64) float partial[16];
  storef(partial, squares);
  float sum = 0.0f;
  for (int i = 0; i < 16; ++i) sum += partial[i];
  const float mean = sum / static_cast<float>(count) + eps;
  const F factor = splatf(1.0f / __builtin_sqrtf(mean));
  for (int64_t k = 0; k < count; k += 16) {
    storef(work + k, mulf(load_floats(element(x, dtype, k), dtype, count - k), factor));
  }
  return quantize_floats(work, Dtype::float32, count, q);
}

uint32_t largest_bits(const void* x, Dtype dtype, int64_t count) {
  V most = zero();
  for (int64_t k = 0; k < count; k += 16) {
    const V bits = magnitude_bits(load_floats(element(x, dtype, k), dtype, count - k));
    most = max_signed(most, choose_greater(bits, splat(kInfinityBits), zero(), bits));
  }
  return static_cast<uint32_t>(reduce_max(most));
}

inline V hash_lanes(V x) {
  x = mul(bit_xor(x, shift_right<16>(x)), splat(static_cast<int32_t>(kHashFirst)));
  x = mul(bit_xor(x, shift_right<15>(x)), splat(static_cast<int32_t>(kHashSecond)));
  return bit_xor(x, shift_right<16>(x));
}

void round_stochastic(const void* x, Dtype dtype, int64_t count, float inverse, uint32_t hash, int8_t* q) {
  alignas(64) uint32_t first[16];
  for (uint32_t i = 0; i < 16; ++i) first[i] = hash + i * kHashStep;
  V counter = load(first);
  const V stride = splat(static_cast<int32_t>(16u * kHashStep));
  const F low = splatf(-127.0f), high = splatf(127.0f), unit = splatf(0x1p-24f), factor = splatf(inverse);
  for (int64_t k = 0; k < count; k += 16) {
    const F noise = mulf(to_float(shift_right<8>(hash_lanes(counter))), unit);
    const F scaled = mulf(load_floats(element(x, dtype, k), dtype, count - k), factor);
    // A NaN passes the clip and becomes an integer whose low byte is 0.
    store_bytes(q + k, to_int(clampf(floorf16(addf(noise, scaled)), low, high)), count - k);
    counter = add(counter, stride);
  }
}

void lookup_row(const uint8_t* strip, int64_t lane, const int8_t* exponent, int64_t columns, int64_t group_size,
                void* out, Dtype dtype) {
  alignas(64) int32_t places[16];
  for (int32_t k = 0; k < 16; ++k) places[k] = k % 4 * 8 + k / 4 * 2;
  const V place = load(places);
  for (int64_t k = 0; k < columns; k += 16) {
    const V word = splat(load_dword(strip + k / kBlockSide * kBlockBytes + 4 * lane));
    const V code = bit_and(shift_right(word, place), splat(3));
    const F scale = power_of_two(splat(exponent[k / group_size]));
    const F weight = mulf(to_float(sub(code, splat(1))), scale);
    store_floats(element(out, dtype, k), dtype, weight, columns - k);
  }
}

}  // namespace
}  // namespace arb
