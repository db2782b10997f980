// Rows: quantisation, the fused norm, stochastic rounding, lookup.
#pragma once

#include "hash.h"
#include "loops_rounding.h"

namespace arb {
namespace {

template <Dtype D>
inline float quantize_floats(Of<D> of, const void* x, int64_t count, int8_t* q) {
  V most = zero();
  sweep(count, [&](auto at) { most = max_signed(most, magnitude_bits(at.load(of, x))); });
  return quantize_values(reduce_max(most), count, q, [&](auto at) { return at.load(of, x); });
}

float quantize_row(const void* x, Dtype dtype, int64_t count, int8_t* q) {
  return by_dtype(dtype, [&](auto of) { return quantize_floats(of, x, count, q); });
}

float norm_quantize_row(const void* x, Dtype dtype, int64_t count, float eps, float* work, int8_t* q) {
  F squares = splatf(0.0f);
  by_dtype(dtype, [&](auto of) {
    sweep(count, [&](auto at) {
      const F f = at.load(of, x);
      squares = addf(squares, mulf(f, f));
    });
  });
  alignas(64) float partial[16];
  storef(partial, squares);
  float sum = 0.0f;
  for (int i = 0; i < 16; ++i) sum += partial[i];
  const float mean = sum / static_cast<float>(count) + eps;
  const F factor = splatf(1.0f / __builtin_sqrtf(mean));
  by_dtype(dtype, [&](auto of) {
    sweep(count, [&](auto at) { at.store(work, mulf(at.load(of, x), factor)); });
  });
  return quantize_floats(Of<Dtype::float32>{}, work, count, q);
}

uint32_t largest_bits(const void* x, Dtype dtype, int64_t count) {
  V most = zero();
  by_dtype(dtype, [&](auto of) {
    sweep(count, [&](auto at) {
      const V bits = magnitude_bits(at.load(of, x));
      most = max_signed(most, choose_greater(bits, splat(kInfinityBits), zero(), bits));
    });
  });
  return static_cast<uint32_t>(reduce_max(most));
}

inline V hash_lanes(V x) {
  x = mul(bit_xor(x, shift_right<16>(x)), splat(static_cast<int32_t>(kHashFirst)));
  x = mul(bit_xor(x, shift_right<15>(x)), splat(static_cast<int32_t>(kHashSecond)));
  return bit_xor(x, shift_right<16>(x));
}

// Numbers that are rounded to one of the integers beside them, by noise that the counter hash makes: sixteen in a row.
class Noise {
 public:
  explicit Noise(uint32_t hash) {
    alignas(64) uint32_t first[16];
    for (uint32_t i = 0; i < 16; ++i) first[i] = hash + i * kHashStep;
    counter_ = load(first);
  }

  // floor(x + u); 24 bits of noise times 2**-24 are exact, so that the sum alone is rounded. NaN as in to_int().
  V round(F x) {
    const F noise = to_float(shift_right<8>(hash_lanes(counter_)));
    counter_ = add(counter_, splat(static_cast<int32_t>(16u * kHashStep)));
    return floor_to_int(fma(noise, splatf(0x1p-24f), x));
  }

 private:
  V counter_;
};

void round_stochastic(const void* x, Dtype dtype, int64_t count, float inverse, uint32_t hash, int8_t* q) {
  Noise noise(hash);
  const F factor = splatf(inverse);
  by_dtype(dtype, [&](auto of) {
    sweep(count, [&](auto at) {
      // Only a sum that was rounded up leaves the range. The low byte of NaN is 0.
      at.store_bytes(q, min_signed(noise.round(mulf(at.load(of, x), factor)), splat(127)));
    });
  });
}

void round_both(const void* x, Dtype dtype, int64_t count, float factor, const BothRoundings& by, int8_t* q,
                int8_t* folded) {
  Noise noise(by.hash), folded_noise(by.folded_hash);
  const F inverse = splatf(by.inverse), folded_inverse = splatf(by.folded_inverse);
  by_dtype(dtype, [&](auto of) {
    alignas(64) char element_of_factor[64];
    Whole{0}.store(of, element_of_factor, splatf(factor));
    const F own = Whole{0}.load(of, element_of_factor);
    sweep(count, [&](auto at) {
      const F f = at.load(of, x);
      at.store_bytes(q, min_signed(noise.round(mulf(f, inverse)), splat(127)));
      const F product = nearest(of, mulf(f, own));
      at.store_bytes(folded, min_signed(folded_noise.round(mulf(product, folded_inverse)), splat(127)));
    });
  });
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
