// The loops of BlockKernels in the sixteen lanes of a simd_<isa>.h. Included after that header by one translation unit
// for each instruction set; everything has internal linkage.
#pragma once

#include <type_traits>

#include "blocks.h"
#include "loops_common.h"
#include "loops_exponential.h"
#include "loops_rounding.h"

namespace arb {
namespace {

inline float reciprocal_norm(F squares, int64_t count, float eps) {
  return 1.0f / __builtin_sqrtf(reduce_sum(squares) / static_cast<float>(count) + eps);
}

inline F positive_part(F x) { return clampf(x, splatf(0.0f), as_float(splat(kInfinityBits))); }

void widen(const void* x, Dtype dtype, int64_t count, float* out) {
  by_dtype(dtype, [&](auto of) { sweep(count, [&](auto at) { at.store(out, at.load(of, x)); }); });
}

void narrow(const float* x, int64_t count, Dtype dtype, void* out) {
  by_dtype(dtype, [&](auto of) { sweep(count, [&](auto at) { at.store(of, out, at.load(x)); }); });
}

void add(const void* x, Dtype dtype, int64_t count, float* sum) {
  by_dtype(dtype, [&](auto of) {
    sweep(count, [&](auto at) { at.store(sum, addf(at.load(sum), at.load(of, x))); });
  });
}

// Quantises the row load(at), normalised unless eps < 0, times the gain, if there is one. `squares` and `most` are the
// sums of its squares and its largest magnitudes, lane by lane.
template <class Load>
inline float quantize_normed(F squares, V most, int64_t count, float eps, const float* gain, int8_t* q, float* r,
                             Load load) {
  const float factor = eps < 0.0f ? 1.0f : reciprocal_norm(squares, count, eps);
  if (eps >= 0.0f) *r = factor;
  const auto value = [&](auto at) {
    const F normed = mulf(load(at), splatf(factor));
    return gain == nullptr ? normed : mulf(normed, at.load(gain));
  };
  int32_t bits;
  if (gain == nullptr) {
    // Products with one factor keep the order of magnitudes: the largest is that of the largest.
    bits = reduce_max(most);
    float largest;
    std::memcpy(&largest, &bits, 4);
    largest *= factor;
    std::memcpy(&bits, &largest, 4);
    bits &= kMagnitudeMask;
  } else {
    most = zero();
    sweep(count, [&](auto at) { most = max_signed(most, magnitude_bits(value(at))); });
    bits = reduce_max(most);
  }
  return quantize_values(bits, count, q, value);
}

float normalise_quantize(const void* x, Dtype dtype, int64_t count, float eps, const float* gain, int8_t* q,
                         float* r) {
  return by_dtype(dtype, [&](auto of) {
    F squares = splatf(0.0f);
    V most = zero();
    sweep(count, [&](auto at) {
      const F f = at.load(of, x);
      squares = fma(f, f, squares);
      most = max_signed(most, magnitude_bits(f));
    });
    return quantize_normed(squares, most, count, eps, gain, q, r, [&](auto at) { return at.load(of, x); });
  });
}

// The gradient behind a norm and its gain, r (d - y mean(d y)) with y = r x: both are asked for twice at every place, y
// with whether it is the second time, and store(at, f) gets the result.
template <class Normed, class Given, class Store>
inline void back_of_norm(int64_t count, F factor, Normed normed, Given given, Gain gain, Store store) {
  F along = splatf(0.0f);
  const auto louder = [&](auto at, F d) { return gain.values == nullptr ? d : mulf(d, at.load(gain.values)); };
  sweep(count, [&](auto at) {
    const F y = normed(at, std::false_type{}), d = given(at);
    if (gain.values != nullptr) at.store(gain.sums, fma(y, d, at.load(gain.sums)));
    along = fma(y, louder(at, d), along);
  });
  const F mean = splatf(-reduce_sum(along) / static_cast<float>(count));
  sweep(count, [&](auto at) {
    const F y = normed(at, std::true_type{});
    store(at, mulf(fma(y, mean, louder(at, given(at))), factor));
  });
}

// `to`: the element type of x and out.
template <Dtype D, Dtype X>
void normalise_back_of(Of<D> of, Of<X> to, const void* const grads[3], const void* x, const float* r, int64_t count,
                       Gain gain, void* out) {
  const auto given = [&](auto at) {
    F d = at.load(of, grads[0]);
    for (int i = 1; i < 3 && grads[i] != nullptr; ++i) d = addf(d, at.load(of, grads[i]));
    return d;
  };
  if (r == nullptr) return sweep(count, [&](auto at) { at.store(to, out, given(at)); });
  const F factor = splatf(*r);
  back_of_norm(
      count, factor, [&](auto at, auto) { return mulf(at.load(to, x), factor); }, given, gain,
      [&](auto at, F f) { at.store(to, out, f); });
}

void normalise_back(const void* const grads[3], Dtype dtype, const void* x, bool floats, const float* r, int64_t count,
                    Gain gain, void* out) {
  by_dtype(dtype, [&](auto of) {
    if (floats) return normalise_back_of(of, Of<Dtype::float32>{}, grads, x, r, count, gain, out);
    normalise_back_of(of, of, grads, x, r, count, gain, out);
  });
}

template <Dtype D>
void gain_back_of(Of<D> of, const void* x, float r, int64_t count, Gain by, float* grad) {
  const F factor = splatf(r);
  sweep(count, [&](auto at) {
    const F d = at.load(grad);
    at.store(by.sums, fma(mulf(at.load(of, x), factor), d, at.load(by.sums)));
    at.store(grad, mulf(d, at.load(by.values)));
  });
}

void gain_back(const float* x, float r, int64_t count, Gain by, float* grad) {
  gain_back_of(Of<Dtype::float32>{}, x, r, count, by, grad);
}

// An activation act(g): `inner` is what its value and its slope are made of.
template <Activation Kind>
struct Kinds {
  static constexpr bool kGated = Kind != Activation::relu2, kSwish = Kind == Activation::swiglu;

  static F inner(F g) { return kSwish ? logistic(g) : positive_part(g); }
  static F value(F g, F s) { return mulf(kSwish ? g : s, s); }
  // s (1 + g (1 - s)) = s + value (1 - s)
  static F slope(F value, F s) { return kSwish ? fma(value, addf(splatf(1.0f), negative(s)), s) : addf(s, s); }
  static F hidden(F value, F u) { return kGated ? mulf(value, u) : value; }

  template <Dtype D>
  static float quantize(Of<D> of, const void* gate, const void* up, int64_t count, float eps, const float* gain,
                        float* work, int8_t* q, float* r) {
    F squares = splatf(0.0f);
    V most = zero();
    sweep(count, [&](auto at) {
      const F u = at.load(of, up), g = kGated ? at.load(of, gate) : u;
      const F f = hidden(value(g, inner(g)), u);
      squares = fma(f, f, squares);
      most = max_signed(most, magnitude_bits(f));
      at.store(work, f);
    });
    return quantize_normed(squares, most, count, eps, gain, q, r, [&](auto at) { return at.load(work); });
  }

  template <Dtype D>
  static void backward(Of<D> of, const void* grad, const void* gate, const void* up, const float* r, Gain gain,
                       int64_t count, float* work, void* grad_gate, void* grad_up) {
    const auto load_gate = [&](auto at) { return at.load(of, kGated ? gate : up); };
    const auto store = [&](auto at, F d, F s) {
      const F act = value(load_gate(at), s), by = slope(act, s);
      at.store(of, grad_up, mulf(d, kGated ? act : by));
      if constexpr (kGated) at.store(of, grad_gate, mulf(mulf(d, at.load(of, up)), by));
    };
    const auto given = [&](auto at) { return at.load(of, grad); };
    if (r == nullptr) return sweep(count, [&](auto at) { store(at, given(at), inner(load_gate(at))); });
    const F factor = splatf(*r);
    const auto normed = [&](auto at, auto again) {
      const F g = load_gate(at);
      F s;
      if constexpr (again) {
        s = at.load(work);
      } else {
        s = inner(g);
        at.store(work, s);
      }
      return mulf(hidden(value(g, s), at.load(of, up)), factor);
    };
    back_of_norm(count, factor, normed, given, gain, [&](auto at, F d) { store(at, d, at.load(work)); });
  }
};

template <class Call>
inline auto by_kind(Activation kind, Call call) {
  switch (kind) {
    case Activation::swiglu:
      return call(Kinds<Activation::swiglu>{});
    case Activation::relu2:
      return call(Kinds<Activation::relu2>{});
    default:
      return call(Kinds<Activation::reglu2>{});
  }
}

float activate_quantize(Activation kind, const void* gate, const void* up, Dtype dtype, int64_t count, float eps,
                        const float* gain, float* work, int8_t* q, float* r) {
  return by_kind(kind, [&](auto act) {
    return by_dtype(dtype, [&](auto of) { return act.quantize(of, gate, up, count, eps, gain, work, q, r); });
  });
}

void activate_back(Activation kind, const void* grad, const void* gate, const void* up, const float* r, Gain gain,
                   Dtype dtype, int64_t count, float* work, void* grad_gate, void* grad_up) {
  by_kind(kind, [&](auto act) {
    by_dtype(dtype, [&](auto of) { act.backward(of, grad, gate, up, r, gain, count, work, grad_gate, grad_up); });
  });
}

template <class At>
inline void load_angles(At at, Rotation by, int64_t row, F& c, F& s) {
  c = by.cos == nullptr ? splatf(1.0f) : at.load(by.cos + row * by.stride);
  s = by.cos == nullptr ? splatf(0.0f) : at.load(by.sin + row * by.stride);
}

void turn(int64_t rows, const void* x, int64_t x_stride, Dtype dtype, int64_t planes, Rotation by, float eps,
          const float* gain, void* y, int64_t y_stride, float* factors) {
  by_dtype(dtype, [&](auto of) {
    for (int64_t row = 0; row < rows; ++row) {
      const void* const first = element(x, dtype, row * x_stride);
      const void* const second = element(first, dtype, planes);
      look_ahead(first, x_stride, 2 * planes, dtype);
      float r = 1.0f;
      if (eps >= 0.0f) {
        F squares = splatf(0.0f);
        sweep(planes, [&](auto at) {
          const F a = at.load(of, first), b = at.load(of, second);
          squares = fma(b, b, fma(a, a, squares));
        });
        r = reciprocal_norm(squares, 2 * planes, eps);
      }
      if (factors != nullptr) factors[row] = r;
      const F factor = splatf(r);
      void* const turned = element(y, dtype, row * y_stride);
      void* const turned_second = element(turned, dtype, planes);
      sweep(planes, [&](auto at) {
        F a = mulf(at.load(of, first), factor), b = mulf(at.load(of, second), factor);
        if (gain != nullptr) {
          a = mulf(a, at.load(gain));
          b = mulf(b, at.load(gain + planes));
        }
        F c, s;
        load_angles(at, by, row, c, s);
        at.store(of, turned, fma(a, c, negative(mulf(b, s))));
        at.store(of, turned_second, fma(b, c, mulf(a, s)));
      });
    }
  });
}

void turn_back(int64_t rows, const float* grad_y, int64_t grad_stride, float scale, const void* x, int64_t x_stride,
               Dtype dtype, int64_t planes, Rotation by, const float* factors, Gain gain, float* work, void* grad_x) {
  const F scales = splatf(scale);
  const int64_t features = 2 * planes;
  by_dtype(dtype, [&](auto of) {
    for (int64_t row = 0; row < rows; ++row) {
      const float* const own = grad_y + row * grad_stride;
      const void* const own_x = element(x, dtype, row * x_stride);
      void* const out = element(grad_x, dtype, row * x_stride);
      look_ahead(own_x, x_stride, features, dtype);
      look_ahead(out, x_stride, features, dtype);
      sweep(planes, [&](auto at) {
        const F a = mulf(at.load(own), scales), b = mulf(at.load(own + planes), scales);
        F c, s;
        load_angles(at, by, row, c, s);
        at.store(work, fma(a, c, mulf(b, s)));
        at.store(work + planes, fma(b, c, negative(mulf(a, s))));
      });
      const auto turned = [&](auto at) { return at.load(work); };
      const auto store = [&](auto at, F f) { at.store(of, out, f); };
      if (factors == nullptr) {
        if (gain.values != nullptr) gain_back_of(of, own_x, 1.0f, features, gain, work);
        sweep(features, [&](auto at) { store(at, turned(at)); });
        continue;
      }
      const F factor = splatf(factors[row]);
      const auto normed = [&](auto at, auto) { return mulf(at.load(of, own_x), factor); };
      back_of_norm(features, factor, normed, turned, gain, store);
    }
  });
}

void scale(const void* x, Dtype dtype, int64_t count, float factor, void* out) {
  by_dtype(dtype, [&](auto of) {
    alignas(64) char rounded[64];
    Whole{0}.store(of, rounded, splatf(factor));
    const F by = Whole{0}.load(of, rounded);
    sweep(count, [&](auto at) { at.store(of, out, mulf(at.load(of, x), by)); });
  });
}

constexpr BlockKernels kBlocks = {widen,     narrow,            add,           normalise_quantize, normalise_back,
                                  gain_back, activate_quantize, activate_back, turn,               turn_back,
                                  scale};

}  // namespace
}  // namespace arb
