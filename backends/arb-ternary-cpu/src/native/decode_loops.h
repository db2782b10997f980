// The loops of DecodeKernels, written in the sixteen lanes of a simd_<isa>.h. Included by one translation unit for each
// instruction set, after that header, and as careful with linkage as products_loops.h.
#pragma once

#include "decode.h"
#include "loops_common.h"

namespace arb {
namespace {

constexpr float kLargestFloat = 0x1.fffffep127f;

// e^x within 2 units in the last place (the polynomial of Cephes), of what is clamped to numbers whose result is
// normal; NaN stays NaN.
inline F exponential(F x) {
  x = clampf(x, splatf(-87.0f), splatf(88.0f));
  const F n = floorf16(fma(x, splatf(1.44269504088896341f), splatf(0.5f)));
  F r = fma(n, splatf(-0.693359375f), x);
  r = fma(n, splatf(2.12194440e-4f), r);
  F p = splatf(1.9875691500e-4f);
  p = fma(p, r, splatf(1.3981999507e-3f));
  p = fma(p, r, splatf(8.3334519073e-3f));
  p = fma(p, r, splatf(4.1665795894e-2f));
  p = fma(p, r, splatf(1.6666665459e-1f));
  p = fma(p, r, splatf(5.0000001201e-1f));
  p = addf(fma(p, mulf(r, r), r), splatf(1.0f));
  return mulf(p, power_of_two(to_int(n)));
}

inline F load_some(const float* x, int64_t count) { return load_floats(x, Dtype::float32, count); }
inline void store_some(float* x, F f, int64_t count) { store_floats(x, Dtype::float32, f, count); }

void norm_row(const float* x, int64_t count, float eps, const float* gain, float* out) {
  F squares[4] = {splatf(0.0f), splatf(0.0f), splatf(0.0f), splatf(0.0f)};
  int64_t k = 0;
  for (; k + 64 <= count; k += 64) {
    unroll<4>(ARB_UNROLLED(i) {
      const F f = loadf(x + k + 16 * i.value);
      squares[i.value] = fma(f, f, squares[i.value]);
    });
  }
  for (; k < count; k += 16) {
    const F f = load_some(x + k, count - k);
    squares[0] = fma(f, f, squares[0]);
  }
  const float sum = reduce_sum(addf(addf(squares[0], squares[1]), addf(squares[2], squares[3])));
  const F factor = splatf(1.0f / __builtin_sqrtf(sum / static_cast<float>(count) + eps));
  for (k = 0; k < count; k += 16) {
    F y = mulf(load_some(x + k, count - k), factor);
    if (gain != nullptr) y = mulf(y, load_some(gain + k, count - k));
    store_some(out + k, y, count - k);
  }
}

void to_floats(const void* x, Dtype dtype, int64_t count, float* out) {
  for (int64_t k = 0; k < count; k += 16) {
    store_some(out + k, load_floats(element(x, dtype, k), dtype, count - k), count - k);
  }
}

void from_floats(const float* x, int64_t count, void* out, Dtype dtype) {
  for (int64_t k = 0; k < count; k += 16) {
    store_floats(element(out, dtype, k), dtype, load_some(x + k, count - k), count - k);
  }
}

void rotate(float* x, const float* cos, const float* sin, int64_t planes) {
  for (int64_t p = 0; p < planes; p += 16) {
    const int64_t count = planes - p;
    const F c = load_some(cos + p, count), s = load_some(sin + p, count);
    const F first = load_some(x + p, count), second = load_some(x + planes + p, count);
    const F minus = mulf(s, splatf(-1.0f));
    store_some(x + p, addf(mulf(first, c), mulf(second, minus)), count);
    store_some(x + planes + p, addf(mulf(second, c), mulf(first, s)), count);
  }
}

inline const void* kept_at(const void* rows, Kept kept, int64_t index) {
  return static_cast<const char*>(rows) + index * kept_size(kept);
}

// Sixteen elements as they are kept.
template <Kept K>
inline F load_kept(const void* x) {
  if constexpr (K == Kept::int8) {
    return to_float(widen_i8(x));
  } else {
    return load_full(x, K == Kept::bfloat16 ? Dtype::bfloat16 : Dtype::float32);
  }
}

// `count` of them, fewer than sixteen, and zeros.
template <Kept K>
inline F load_kept(const void* x, int64_t count) {
  alignas(64) char padded[64] = {};
  std::memcpy(padded, x, static_cast<size_t>(count * kept_size(K)));
  return load_kept<K>(padded);
}

// Dot products of a query with R rows, `features` apart.
template <Kept K, int R>
inline void score_rows(const float* query, const void* keys, int64_t features, float scale, float* scores) {
  F sums[R];
  unroll<R>(ARB_UNROLLED(r) { sums[r.value] = splatf(0.0f); });
  const int64_t whole = features / 16 * 16;
  for (int64_t c = 0; c < whole; c += 16) {
    const F q = loadf(query + c);
    unroll<R>(ARB_UNROLLED(r) {
      sums[r.value] = fma(q, load_kept<K>(kept_at(keys, K, r.value * features + c)), sums[r.value]);
    });
  }
  if (whole < features) {
    const int64_t left = features - whole;
    const F q = load_some(query + whole, left);
    unroll<R>(ARB_UNROLLED(r) {
      sums[r.value] = fma(q, load_kept<K>(kept_at(keys, K, r.value * features + whole), left), sums[r.value]);
    });
  }
  alignas(16) float four[4];
  if constexpr (R == 4) {
    reduce_sums(sums, four);
  } else {
    // In the order in which four at once are added.
    const F alone[4] = {sums[0], splatf(0.0f), splatf(0.0f), splatf(0.0f)};
    reduce_sums(alone, four);
  }
  for (int r = 0; r < R; ++r) scores[r] = four[r] * scale;
}

// Sums over rows, `stride` apart, of weight[row] * row: rows take turns with two sets of sums, because one would be
// waiting for itself. even[0 .. 16 S) gets those of rows 0, 2, ...
template <Kept K, int S>
inline void weigh_rows(const float* weights, const void* values, int64_t rows, int64_t stride, float* even,
                       float* odd) {
  F sums[2][S];
  unroll<S>(ARB_UNROLLED(s) {
    sums[0][s.value] = loadf(even + 16 * s.value);
    sums[1][s.value] = loadf(odd + 16 * s.value);
  });
  int64_t t = 0;
  for (; t + 2 <= rows; t += 2) {
    unroll<2>(ARB_UNROLLED(i) {
      const F w = splatf(weights[t + i.value]);
      unroll<S>(ARB_UNROLLED(s) {
        F& sum = sums[i.value][s.value];
        sum = fma(w, load_kept<K>(kept_at(values, K, (t + i.value) * stride + 16 * s.value)), sum);
      });
    });
  }
  if (t < rows) {
    const F w = splatf(weights[t]);
    unroll<S>(ARB_UNROLLED(s) {
      sums[0][s.value] = fma(w, load_kept<K>(kept_at(values, K, t * stride + 16 * s.value)), sums[0][s.value]);
    });
  }
  unroll<S>(ARB_UNROLLED(s) {
    storef(even + 16 * s.value, sums[0][s.value]);
    storef(odd + 16 * s.value, sums[1][s.value]);
  });
}

// `rest`: where the features beyond the last whole sixteen are summed, one row after another.
template <Kept K>
inline void add_values(const float* weights, const void* values, int64_t rows, int64_t features, float* even,
                       float* odd, float* rest) {
  int64_t c = 0;
  const auto from = [&] { return kept_at(values, K, c); };
  for (; c + 128 <= features; c += 128) weigh_rows<K, 8>(weights, from(), rows, features, even + c, odd + c);
  for (; c + 64 <= features; c += 64) weigh_rows<K, 4>(weights, from(), rows, features, even + c, odd + c);
  for (; c + 16 <= features; c += 16) weigh_rows<K, 1>(weights, from(), rows, features, even + c, odd + c);
  if (c < features) {
    const int64_t left = features - c;
    F sum = load_some(rest + c, left);
    for (int64_t t = 0; t < rows; ++t) {
      sum = fma(splatf(weights[t]), load_kept<K>(kept_at(values, K, t * features + c), left), sum);
    }
    store_some(rest + c, sum, left);
  }
}

// Adds the odd sums to the even ones, and clears them.
inline void join_sums(int64_t features, float* even, float* odd) {
  for (int64_t c = 0; c + 16 <= features; c += 16) {
    storef(even + c, addf(loadf(even + c), loadf(odd + c)));
    storef(odd + c, splatf(0.0f));
  }
}

// x[i] *= scales[i].
inline void multiply_by(const float* scales, int64_t count, float* x) {
  for (int64_t t = 0; t < count; t += 16) {
    const int64_t left = count - t;
    store_some(x + t, mulf(load_some(x + t, left), load_some(scales + t, left)), left);
  }
}

// Calls f(slot, count) for the stretches of slots that lie in one block.
template <class Use>
inline void stretches(int64_t first, int64_t last, int64_t size, Use use) {
  while (first < last) {
    const int64_t count = smaller(last, (first / size + 1) * size) - first;
    use(first, count);
    first += count;
  }
}

template <Kept K>
inline void attend_of(const float* query, const KeptRows& keys, const KeptRows& values, int64_t slot, int64_t past,
                      float scale, float* scores, float* spare, float* out) {
  const int64_t features = keys.features, oldest = slot - past, total = past + 1;
  stretches(oldest, slot + 1, keys.size, [&](int64_t first, int64_t count) {
    const void* const rows = keys.at(first);
    float* const to = scores + (first - oldest);
    int64_t t = 0;
    for (; t + 4 <= count; t += 4) score_rows<K, 4>(query, kept_at(rows, K, t * features), features, scale, to + t);
    for (; t < count; ++t) score_rows<K, 1>(query, kept_at(rows, K, t * features), features, scale, to + t);
    if constexpr (K == Kept::int8) multiply_by(keys.scales_at(first), count, to);
  });

  // Lanes beyond the last get a weight that no sum of at least 1 notices.
  const int64_t padded = (total + 15) / 16 * 16;
  int64_t t = total;
  for (; t < padded; ++t) scores[t] = -kLargestFloat;
  const F most = splatf(kLargestFloat);
  F largest = splatf(-kLargestFloat);
  for (t = 0; t < padded; t += 16) largest = clampf(loadf(scores + t), largest, most);
  alignas(64) float lane[16];
  storef(lane, largest);
  for (int i = 1; i < 16; ++i) lane[0] = lane[i] > lane[0] ? lane[i] : lane[0];
  const F shift = splatf(-lane[0]);
  F sums = splatf(0.0f);
  for (t = 0; t < padded; t += 16) {
    const F weight = exponential(addf(loadf(scores + t), shift));
    sums = addf(sums, weight);
    storef(scores + t, weight);
  }
  for (int64_t c = 0; c < features; ++c) out[c] = spare[c] = 0.0f;
  // Which rows are even depends on where attention begins, and not on the blocks. The slot itself comes last, alone.
  const auto add = [&](int64_t first, int64_t count) {
    float* const weights = scores + (first - oldest);
    if constexpr (K == Kept::int8) multiply_by(values.scales_at(first), count, weights);
    const bool swapped = first < slot && (first - oldest) % 2 != 0;
    add_values<K>(weights, values.at(first), count, features, swapped ? spare : out, swapped ? out : spare, out);
  };
  stretches(oldest, slot, values.size, add);
  join_sums(features, out, spare);
  add(slot, 1);
  join_sums(features, out, spare);
  const F inverse = splatf(1.0f / reduce_sum(sums));
  for (int64_t c = 0; c < features; c += 16) {
    store_some(out + c, mulf(load_some(out + c, features - c), inverse), features - c);
  }
}

void attend(const float* query, const KeptRows& keys, const KeptRows& values, int64_t slot, int64_t past, float scale,
            float* scores, float* spare, float* out) {
  switch (keys.kept) {
    case Kept::float32:
      return attend_of<Kept::float32>(query, keys, values, slot, past, scale, scores, spare, out);
    case Kept::bfloat16:
      return attend_of<Kept::bfloat16>(query, keys, values, slot, past, scale, scores, spare, out);
    case Kept::int8:
      return attend_of<Kept::int8>(query, keys, values, slot, past, scale, scores, spare, out);
  }
}

inline F relu_squared(F x) {
  const F positive = clampf(x, splatf(0.0f), splatf(__builtin_inff()));
  return mulf(positive, positive);
}

void activate(Activation activation, const float* gate, float* up, int64_t count) {
  for (int64_t k = 0; k < count; k += 16) {
    F y = load_some(up + k, count - k);
    if (activation == Activation::relu2) {
      y = relu_squared(y);
    } else {
      const F g = load_some(gate + k, count - k);
      if (activation == Activation::reglu2) {
        y = mulf(relu_squared(g), y);
      } else {
        const F below = addf(splatf(1.0f), exponential(mulf(g, splatf(-1.0f))));
        y = mulf(divf(g, below), y);
      }
    }
    store_some(up + k, y, count - k);
  }
}

constexpr DecodeKernels kDecode = {norm_row, to_floats, from_floats, rotate, attend, activate};

}  // namespace
}  // namespace arb
