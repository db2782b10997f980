// Patches of an image: its lines as floats, and sixteen patches at a time to int8.
#pragma once

#include "loops_rounding.h"

namespace arb {
namespace {

// Elements `stride` apart, and zeros after the last of `count`.
inline F load_strided(const void* x, Dtype dtype, int64_t stride, int64_t count) {
  if (stride == 1 && count >= 16 && dtype == Dtype::float32) return loadf(static_cast<const float*>(x));
  if (stride == 1) return load_floats(x, dtype, count);
  alignas(64) char sixteen[64] = {};
  const int64_t size = dtype_size(dtype);
  for (int64_t i = 0; i < smaller(16, count); ++i) {
    std::memcpy(sixteen + i * size, element(x, dtype, i * stride), static_cast<size_t>(size));
  }
  return load_full(sixteen, dtype);
}

void gather_columns(const void* x, Dtype dtype, int64_t channel_stride, int64_t column_stride, int64_t channels,
                    int64_t columns, int64_t line_stride, float* lines) {
  float* const largest = lines + channels * line_stride;
  if (column_stride <= channel_stride) {
    for (int64_t w = 0; w < columns; w += 16) {
      V most = zero();
      for (int64_t c = 0; c < channels; ++c) {
        const void* const from = element(x, dtype, c * channel_stride + w * column_stride);
        const F f = load_strided(from, dtype, column_stride, columns - w);
        storef(lines + c * line_stride + w, f);
        most = max_signed(most, magnitude_bits(f));
      }
      storef(largest + w, as_float(most));
    }
    return;
  }
  for (int64_t w = 0; w < columns; ++w) {
    V most = zero();
    for (int64_t c = 0; c < channels; c += 16) {
      const void* const from = element(x, dtype, c * channel_stride + w * column_stride);
      const F f = load_strided(from, dtype, channel_stride, channels - c);
      most = max_signed(most, magnitude_bits(f));
      alignas(64) float sixteen[16];
      storef(sixteen, f);
      for (int64_t i = 0; i < smaller(16, channels - c); ++i) lines[(c + i) * line_stride + w] = sixteen[i];
    }
    const int32_t bits = reduce_max(most);
    std::memcpy(largest + w, &bits, 4);
  }
}

void place_lines(const float* from, int64_t from_stride, int64_t step, int64_t low, int64_t high, int64_t lines,
                 float* to, int64_t pitch) {
  for (int64_t line = 0; line < lines; ++line) {
    for (int64_t i = 0; i < low; ++i) to[i] = 0.0f;
    if (step == 1) {
      for (int64_t i = low; i < high; i += 16) storef(to + i, loadf(from + (i - low)));
    } else {
      for (int64_t i = low; i < high; ++i) to[i] = from[(i - low) * step];
    }
    for (int64_t i = high; i < pitch; ++i) to[i] = 0.0f;
    from += from_stride;
    to += pitch;
  }
}

// The low byte of an integer as byte I of a dword.
template <int I>
inline V byte_of(V q) {
  return I == 3 ? shift_left<24>(q) : shift_left<8 * I>(bit_and(q, splat(0xFF)));
}

// Apart from the loop, which would otherwise keep what it loaded for this.
template <class Load>
[[gnu::noinline]] V divided_bytes(Load load_lanes, const int64_t* offsets, F divisor) {
  V bytes = zero();
  unroll<4>(ARB_UNROLLED(i) {
    bytes = bit_or(bytes, byte_of<i.value>(to_int(divf(load_lanes(offsets[i.value]), divisor))));
  });
  return bytes;
}

// Load(offset): an element of each of sixteen patches.
template <class Load>
inline void quantize_loaded(Load load_lanes, const int64_t* offsets, int64_t steps, V most, uint8_t flip,
                            uint8_t* panel, float* scale) {
  const F scales = divf(as_float(most), splatf(127.0f));
  storef(scale, scales);
  // Patches of zeros, and those with values that are not finite, are 0.
  const V finite = choose_greater(splat(kInfinityBits), most, splat(-1), zero());
  const V kept = bit_and(finite, choose_greater(as_bits(scales), zero(), splat(-1), zero()));
  const F divisor = as_float(choose_greater(zero(), kept, as_bits(scales), as_bits(splatf(1.0f))));
  const V flips = splat(static_cast<int32_t>(0x01010101u * flip));
  const Rounding rounding(divisor);
  for (int64_t step = 0; step < steps; ++step) {
    V bytes = zero(), worst = zero();
    unroll<4>(ARB_UNROLLED(i) {
      bytes = bit_or(bytes, byte_of<i.value>(rounding.quick(load_lanes(offsets[4 * step + i.value]), worst)));
    });
    if (!rounding.certain(worst)) bytes = divided_bytes(load_lanes, offsets + 4 * step, divisor);
    store(panel + step * kBlockBytes, bit_xor(bit_and(bytes, kept), flips));
  }
}

void quantize_patches(const float* planes, const int64_t* quarters, const int64_t* offsets, int64_t steps,
                      const float* largest, int64_t taps, uint8_t flip, uint8_t* panel, float* scale) {
  const float* const at[4] = {planes + quarters[0], planes + quarters[1], planes + quarters[2], planes + quarters[3]};
  const int64_t beyond = largest - planes;
  const auto from_quarters = [&](int64_t offset) {
    return load_quarters(at[0] + offset, at[1] + offset, at[2] + offset, at[3] + offset);
  };
  V most = zero();
  for (int64_t t = 0; t < taps; ++t) most = max_signed(most, as_bits(from_quarters(beyond + offsets[t])));
  if (at[1] == at[0] + 4 && at[3] == at[2] + 4) {
    const auto from_halves = [&](int64_t offset) { return load_halves(at[0] + offset, at[2] + offset); };
    quantize_loaded(from_halves, offsets, steps, most, flip, panel, scale);
  } else {
    quantize_loaded(from_quarters, offsets, steps, most, flip, panel, scale);
  }
}

}  // namespace
}  // namespace arb
