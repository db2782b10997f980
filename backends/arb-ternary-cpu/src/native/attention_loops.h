// The loops of AttentionKernels in the sixteen lanes of a simd_<isa>.h. Included after that header by one translation
// unit for each instruction set; everything has internal linkage.
#pragma once

#include "attention.h"
#include "loops_common.h"
#include "loops_exponential.h"

namespace arb {
namespace {

// Sums that live in registers: rows x vectors.
constexpr int kSumRows = kTileStrips == 2 ? 8 : 4;
constexpr int kSumVectors = kTileStrips;

// A word is a float32.
struct FloatWords {
  using Operand = F;
  static constexpr int64_t kTerms = 1;
  static F load_words(const uint32_t* p) { return as_float(load(p)); }
  static F splat_word(const uint32_t* p) { return as_float(splat(load_dword(p))); }
  static F multiply_add(F x, F w, F sum) { return fma(x, w, sum); }
  static void store_row(Words to, int64_t row, int64_t k, F f) { store(to.first + row * to.stride + k, as_bits(f)); }
  // Of two rows, words along the rows.
  static void store_rows(Words to, int64_t row, int64_t k, F first, F second) {
    store_row(to, row, k, first);
    store_row(to, row + 1, k, second);
  }
};

template <class Kind, int R, int W>
inline void corner(int64_t k, Words a, Words b, float* sums, int64_t stride, bool adds) {
  F held[R * W];
  unroll<R * W>(ARB_UNROLLED(i) {
    held[i.value] = adds ? loadf(sums + i.value / W * stride + i.value % W * 16) : splatf(0.0f);
  });
  const uint32_t* x = a.first;
  const uint32_t* y = b.first;
  const int64_t below = a.stride;
  for (int64_t t = 0; t < k; ++t, ++x, y += b.stride) {
    typename Kind::Operand w[W];
    unroll<W>(ARB_UNROLLED(j) { w[j.value] = Kind::load_words(y + 16 * j.value); });
    unroll<R>(ARB_UNROLLED(r) {
      const auto each = Kind::splat_word(x + r.value * below);
      unroll<W>(ARB_UNROLLED(j) {
        F& sum = held[r.value * W + j.value];
        sum = Kind::multiply_add(each, w[j.value], sum);
      });
    });
  }
  unroll<R * W>(ARB_UNROLLED(i) { storef(sums + i.value / W * stride + i.value % W * 16, held[i.value]); });
}

template <class Kind>
void multiply(int64_t m, int64_t n, int64_t k, Words a, Words b, float* sums, int64_t stride, bool adds) {
  int64_t j = 0;
  for (; j + 16 * kSumVectors <= n; j += 16 * kSumVectors) {
    for (int64_t i = 0; i < m; i += kSumRows) {
      corner<Kind, kSumRows, kSumVectors>(k, {a.first + i * a.stride, a.stride}, {b.first + j, b.stride},
                                          sums + i * stride + j, stride, adds);
    }
  }
  for (; j < n; j += 16) {
    for (int64_t i = 0; i < m; i += kSumRows) {
      corner<Kind, kSumRows, 1>(k, {a.first + i * a.stride, a.stride}, {b.first + j, b.stride},
                                sums + i * stride + j, stride, adds);
    }
  }
}

void transpose(int64_t rows, int64_t columns, Words from, Words to) {
  for (int64_t i = 0; i < rows; i += 16) {
    for (int64_t j = 0; j < columns; j += 4) {
      V four[4];
      load_columns(reinterpret_cast<const int8_t*>(from.first + i * from.stride + j), 4 * from.stride, four);
      for (int64_t c = 0; c < 4; ++c) store(to.first + (j + c) * to.stride + i, four[c]);
    }
  }
}

void interleave(int64_t rows, int64_t columns, Words from, Words to) {
  for (int64_t i = 0; i < rows; i += 2) {
    const auto* const first = reinterpret_cast<const char*>(from.first + i * from.stride);
    const auto* const second = reinterpret_cast<const char*>(from.first + (i + 1) * from.stride);
    for (int64_t j = 0; j < columns; j += 16) {
      const V pairs = bit_or(widen_u16(first + 2 * j), shift_left<16>(widen_u16(second + 2 * j)));
      store(to.first + i / 2 * to.stride + j, pairs);
    }
  }
}

alignas(64) constexpr int32_t kLanes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// The first `count` lanes of f, which may be fewer than none or more than all, and `otherwise` in the rest.
inline F only(F f, int64_t count, V otherwise) {
  return as_float(choose_greater(load(kLanes), splat(static_cast<int32_t>(count) - 1), otherwise, as_bits(f)));
}

// That of the lanes of f; any where one is NaN.
inline float largest(F f) {
  const auto in_order = [](V bits) { return bit_xor(bits, bit_and(shift_right_signed<31>(bits), splat(kMagnitudeMask))); };
  const int32_t most = reduce_max(in_order(as_bits(f)));
  const int32_t bits = most ^ ((most >> 31) & kMagnitudeMask);
  float found;
  std::memcpy(&found, &bits, 4);
  return found;
}

template <class Kind>
void soften(const float* scores, int64_t stride, int64_t first, int64_t rows, int64_t n, float scale, Words p,
            float* most, float* sums) {
  const F infinite = as_float(splat(kInfinityBits)), by = splatf(scale);
  const V lowest = splat(kInfinityBits | INT32_MIN);
  for (int64_t row = 0; row < rows; ++row) {
    const float* const own = scores + row * stride;
    const int64_t seen = first + row + 1, whole = seen / 16 * 16;
    F top = as_float(lowest);
    int64_t k = 0;
    for (; k < whole; k += 16) top = clampf(loadf(own + k), top, infinite);
    if (k < seen) top = clampf(only(loadf(own + k), seen - k, lowest), top, infinite);
    most[row] = largest(top);
    const F shift = splatf(-scale * most[row]);
    F sum = splatf(0.0f);
    for (k = 0; k < whole; k += 16) {
      const F e = exponential(fma(loadf(own + k), by, shift));
      sum = addf(sum, e);
      Kind::store_row(p, row, k, e);
    }
    for (; k < n; k += 16) {
      const F e = k < seen ? only(exponential(fma(loadf(own + k), by, shift)), seen - k, zero()) : splatf(0.0f);
      sum = addf(sum, e);
      Kind::store_row(p, row, k, e);
    }
    sums[row] = reduce_sum(sum);
  }
}

template <class Kind>
void soften_back(const float* scores, const float* grad, int64_t stride, int64_t first, int64_t rows, int64_t tile,
                 int64_t n, float scale, const float* logs, const float* dots, Words p, Words by_key, Words by_row) {
  const F by = splatf(scale);
  for (int64_t row = 0; row < tile; row += 2) {
    F shift[2], minus[2];
    int64_t seen[2];
    for (int i = 0; i < 2; ++i) {
      const bool is_one = row + i < rows;
      shift[i] = splatf(is_one ? -logs[row + i] : 0.0f);
      minus[i] = splatf(is_one ? -dots[row + i] : 0.0f);
      seen[i] = is_one ? first + row + i + 1 : 0;
    }
    const float* const own[2] = {scores + row * stride, scores + (row + 1) * stride};
    const float* const given[2] = {grad + row * stride, grad + (row + 1) * stride};
    const auto step = [&](int64_t k, auto mask) __attribute__((always_inline)) {
      F e[2], slope[2];
      unroll<2>(ARB_UNROLLED(i) {
        e[i.value] = mask(exponential(fma(loadf(own[i.value] + k), by, shift[i.value])), i.value);
        slope[i.value] = mulf(e[i.value], addf(loadf(given[i.value] + k), minus[i.value]));
        slope[i.value] = mask(slope[i.value], i.value);
      });
      Kind::store_rows(p, row, k, e[0], e[1]);
      if constexpr (Kind::kTerms > 1) {
        Kind::store_row(by_key, row, k, slope[0]);
        Kind::store_row(by_key, row + 1, k, slope[1]);
      }
      Kind::store_rows(by_row, row, k, slope[0], slope[1]);
    };
    const int64_t whole = smaller(seen[0], seen[1]) / 16 * 16;
    int64_t k = 0;
    for (; k < whole; k += 16) step(k, [](F f, int) { return f; });
    for (; k < n; k += 16) step(k, [&](F f, int i) { return only(f, smaller(seen[i] - k, 16), zero()); });
  }
}

void dots(int64_t rows, const void* a, const void* b, int64_t stride, Dtype dtype, int64_t count, float* out) {
  by_dtype(dtype, [&](auto of) {
    for (int64_t row = 0; row < rows; ++row) {
      const void* const x = element(a, dtype, row * stride);
      const void* const y = element(b, dtype, row * stride);
      look_ahead(y, stride, count, dtype);
      F sum = splatf(0.0f);
      sweep(count, [&](auto at) { sum = fma(at.load(of, x), at.load(of, y), sum); });
      out[row] = reduce_sum(sum);
    }
  });
}

void finish(int64_t rows, const float* x, int64_t x_stride, int64_t count, const float* factors, Dtype dtype, void* out,
            int64_t stride) {
  by_dtype(dtype, [&](auto of) {
    for (int64_t row = 0; row < rows; ++row) {
      const F by = splatf(factors[row]);
      const float* const from = x + row * x_stride;
      void* const to = element(out, dtype, row * stride);
      look_ahead(to, stride, count, dtype);
      sweep(count, [&](auto at) { at.store(of, to, mulf(at.load(from), by)); });
    }
  });
}

template <class Kind>
constexpr AttentionKernels attention_of() {
  return {Kind::kTerms, nullptr,      nullptr,           multiply<Kind>, transpose,
          interleave,   soften<Kind>, soften_back<Kind>, dots,           finish};
}

}  // namespace
}  // namespace arb
