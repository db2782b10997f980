// What the loops share: unrolling, exponents, and elements of any dtype. Included after a simd_<isa>.h, as all
// loops_*.h are.
#pragma once

#include <cstring>

#include "products.h"

namespace arb {
namespace {

constexpr int32_t kCodeMask = 0x03030303;
constexpr int32_t kInfinityBits = 0x7F800000;
constexpr int32_t kMagnitudeMask = 0x7FFFFFFF;

// Loops that are unrolled before the compiler decides which arrays live in registers; with a plain `for` gcc keeps the
// sums of a tile in memory as well.
template <int I>
struct Index {
  static constexpr int value = I;
};

template <int N, class F>
[[gnu::always_inline]] inline void unroll(F f) {
  if constexpr (N > 0) {
    unroll<N - 1>(f);
    f(Index<N - 1>{});
  }
}

#define ARB_UNROLLED(i) [&](auto i) __attribute__((always_inline))

inline int32_t load_dword(const void* p) {
  int32_t value;
  std::memcpy(&value, p, 4);
  return value;
}

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// How far decoding looks ahead; along the rows of the weight, blocks are a page or more apart.
constexpr int64_t kBlocksAhead = 24;

// The exponents of the 16 rows of a block: one byte of each dword, sign-extended.
inline V block_exponents(const uint8_t* gathered, int64_t group) {
  const V four = load(gathered + group / 4 * kBlockBytes);
  return shift_right_signed<24>(shift_left(four, splat(static_cast<int32_t>(24 - group % 4 * 8))));
}

inline F negative(F f) { return as_float(bit_xor(as_bits(f), splat(INT32_MIN))); }
inline F power_of_two(V exponent) { return as_float(shift_left<23>(add(exponent, splat(127)))); }

// Loops are instantiated for each dtype, and take whole vectors apart from the last: a load that asked for its dtype and
// its length would take longer than what is computed.
template <Dtype D>
struct Of {};

inline const void* element(const void* x, Dtype dtype, int64_t index) {
  return static_cast<const char*>(x) + index * dtype_size(dtype);
}
inline void* element(void* x, Dtype dtype, int64_t index) { return static_cast<char*>(x) + index * dtype_size(dtype); }

inline F load_full(const void* x, Dtype dtype) {
  switch (dtype) {
    case Dtype::bfloat16:
      return as_float(shift_left<16>(widen_u16(x)));
    case Dtype::float16:
      return load_half(x);
    default:
      return loadf(static_cast<const float*>(x));
  }
}

// Sixteen elements, or `count` and zeros.
inline F load_floats(const void* x, Dtype dtype, int64_t count) {
  if (count >= 16) return load_full(x, dtype);
  alignas(64) char padded[64] = {};
  std::memcpy(padded, x, static_cast<size_t>(count * dtype_size(dtype)));
  return load_full(padded, dtype);
}

// The nearest number of an element type. What is NaN has to be one of that type, or the default of the processor.
template <Dtype D>
inline F nearest(Of<D>, F f) {
  if constexpr (D == Dtype::bfloat16) {
    const V word = as_bits(f);
    const V odd = bit_and(shift_right<16>(word), splat(1));
    return as_float(bit_and(add(add(word, splat(0x7FFF)), odd), splat(INT32_MIN >> 15)));
  }
  if constexpr (D == Dtype::float16) {
    alignas(64) char element[32];
    store_half(element, f);
    return load_half(element);
  }
  return f;
}

inline V bfloat16_bits(F f) {
  const V word = as_bits(f);
  const V odd = bit_and(shift_right<16>(word), splat(1));
  const V rounded = shift_right<16>(add(word, add(splat(0x7FFF), odd)));
  return choose_greater(bit_and(word, splat(kMagnitudeMask)), splat(kInfinityBits), splat(0x7FC0), rounded);
}

#if !defined(ARB_HARDWARE_BFLOAT16)
inline void store_bfloat16(void* out, F f) { narrow_16(out, bfloat16_bits(f)); }
#endif

inline void store_full(void* out, Dtype dtype, F f) {
  switch (dtype) {
    case Dtype::bfloat16:
      store_bfloat16(out, f);
      break;
    case Dtype::float16:
      store_half(out, f);
      break;
    default:
      storef(static_cast<float*>(out), f);
  }
}

inline void store_floats(void* out, Dtype dtype, F f, int64_t count) {
  if (count >= 16) {
    store_full(out, dtype, f);
    return;
  }
  alignas(64) char whole[64];
  store_full(whole, dtype, f);
  std::memcpy(out, whole, static_cast<size_t>(count * dtype_size(dtype)));
}

// Brings the row that is `kRowsAhead` rows further on into the cache: where heads are rows of a wider matrix, no
// processor looks ahead by itself.
constexpr int64_t kRowsAhead = 12;
[[gnu::always_inline]] inline void look_ahead(const void* row, int64_t stride, int64_t count, Dtype dtype) {
  const auto* const ahead = static_cast<const char*>(element(row, dtype, kRowsAhead * stride));
  for (int64_t i = 0; i < count * dtype_size(dtype); i += 64) prefetch(ahead + i);
}

template <class Loop>
inline auto by_dtype(Dtype dtype, Loop loop) {
  switch (dtype) {
    case Dtype::bfloat16:
      return loop(Of<Dtype::bfloat16>{});
    case Dtype::float16:
      return loop(Of<Dtype::float16>{});
    default:
      return loop(Of<Dtype::float32>{});
  }
}

// Sixteen elements of a row from k on, and its last ones, fewer.
struct Whole {
  int64_t k;
  template <Dtype D>
  F load(Of<D>, const void* x) const {
    return load_full(element(x, D, k), D);
  }
  template <Dtype D>
  void store(Of<D>, void* x, F f) const {
    store_full(element(x, D, k), D, f);
  }
  F load(const float* x) const { return loadf(x + k); }
  void store(float* x, F f) const { storef(x + k, f); }
  // The low bytes of the lanes.
  void store_bytes(int8_t* x, V lanes) const { narrow_8(x + k, lanes); }
};
struct Last {
  int64_t k, count;
  template <Dtype D>
  F load(Of<D>, const void* x) const {
    return load_floats(element(x, D, k), D, count);
  }
  template <Dtype D>
  void store(Of<D>, void* x, F f) const {
    store_floats(element(x, D, k), D, f, count);
  }
  F load(const float* x) const { return load(Of<Dtype::float32>{}, x); }
  void store(float* x, F f) const { store(Of<Dtype::float32>{}, x, f); }
  void store_bytes(int8_t* x, V lanes) const {
    int8_t whole[16];
    narrow_8(whole, lanes);
    std::memcpy(x + k, whole, static_cast<size_t>(count));
  }
};

template <class Body>
inline void sweep(int64_t count, Body body) {
  int64_t k = 0;
  for (; k + 16 <= count; k += 16) body(Whole{k});
  if (k < count) body(Last{k, count - k});
}

}  // namespace
}  // namespace arb
