// The loops of BlockKernels in the sixteen lanes of a simd_<isa>.h. Included after that header by one translation unit
// for each instruction set; everything has internal linkage.
#pragma once

#include "blocks.h"
#include "loops_common.h"
#include "loops_exponential.h"

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

float normalise(float* x, int64_t count, float eps) {
  F squares = splatf(0.0f);
  sweep(count, [&](auto at) {
    const F f = at.load(x);
    squares = fma(f, f, squares);
  });
  const float r = reciprocal_norm(squares, count, eps);
  const F factor = splatf(r);
  sweep(count, [&](auto at) { at.store(x, mulf(at.load(x), factor)); });
  return r;
}

void normalise_back(const float* x, float r, int64_t count, float* grad) {
  const F factor = splatf(r);
  F along = splatf(0.0f);
  sweep(count, [&](auto at) { along = fma(mulf(at.load(x), factor), at.load(grad), along); });
  const F mean = splatf(-reduce_sum(along) / static_cast<float>(count));
  sweep(count, [&](auto at) {
    const F y = mulf(at.load(x), factor);
    at.store(grad, mulf(fma(y, mean, at.load(grad)), factor));
  });
}

void gain(const float* by, int64_t count, float* x) {
  sweep(count, [&](auto at) { at.store(x, mulf(at.load(x), at.load(by))); });
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

template <Activation Kind>
struct Kinds {
  static void forward(const void* gate, const void* up, Dtype dtype, int64_t count, float* hidden, float* sigmoid) {
    by_dtype(dtype, [&](auto of) {
      sweep(count, [&](auto at) {
        const F u = at.load(of, up);
        const F g = Kind == Activation::relu2 ? u : at.load(of, gate);
        if constexpr (Kind == Activation::swiglu) {
          const F s = logistic(g);
          if (sigmoid != nullptr) at.store(sigmoid, s);
          return at.store(hidden, mulf(mulf(g, s), u));
        }
        const F rest = positive_part(g);
        const F square = mulf(rest, rest);
        at.store(hidden, Kind == Activation::relu2 ? square : mulf(square, u));
      });
    });
  }

  static void backward(const float* grad, const void* gate, const void* up, const float* sigmoid, Dtype dtype,
                       int64_t count, void* grad_gate, void* grad_up) {
    by_dtype(dtype, [&](auto of) {
      sweep(count, [&](auto at) {
        const F d = at.load(grad), u = at.load(of, up);
        const F g = Kind == Activation::relu2 ? u : at.load(of, gate);
        F value, slope;  // of the activation
        if constexpr (Kind == Activation::swiglu) {
          const F s = sigmoid == nullptr ? logistic(g) : at.load(sigmoid);
          value = mulf(g, s);
          // s (1 + g (1 - s)) = s + value (1 - s)
          slope = fma(value, addf(splatf(1.0f), negative(s)), s);
        } else {
          const F rest = positive_part(g);
          value = mulf(rest, rest);
          slope = addf(rest, rest);
        }
        if constexpr (Kind == Activation::relu2) {
          at.store(of, grad_up, mulf(d, slope));
        } else {
          at.store(of, grad_up, mulf(d, value));
          at.store(of, grad_gate, mulf(mulf(d, u), slope));
        }
      });
    });
  }
};

void activate(Activation kind, const void* gate, const void* up, Dtype dtype, int64_t count, float* hidden,
              float* sigmoid) {
  switch (kind) {
    case Activation::swiglu:
      return Kinds<Activation::swiglu>::forward(gate, up, dtype, count, hidden, sigmoid);
    case Activation::relu2:
      return Kinds<Activation::relu2>::forward(gate, up, dtype, count, hidden, sigmoid);
    default:
      return Kinds<Activation::reglu2>::forward(gate, up, dtype, count, hidden, sigmoid);
  }
}

void activate_back(Activation kind, const float* grad, const void* gate, const void* up, const float* sigmoid,
                   Dtype dtype, int64_t count, void* grad_gate, void* grad_up) {
  switch (kind) {
    case Activation::swiglu:
      return Kinds<Activation::swiglu>::backward(grad, gate, up, sigmoid, dtype, count, grad_gate, grad_up);
    case Activation::relu2:
      return Kinds<Activation::relu2>::backward(grad, gate, up, sigmoid, dtype, count, grad_gate, grad_up);
    default:
      return Kinds<Activation::reglu2>::backward(grad, gate, up, sigmoid, dtype, count, grad_gate, grad_up);
  }
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
      if (gain.values != nullptr) gain_back_of(of, own_x, factors == nullptr ? 1.0f : factors[row], features, gain, work);
      if (factors == nullptr) {
        sweep(features, [&](auto at) { at.store(of, out, at.load(work)); });
        continue;
      }
      const F factor = splatf(factors[row]);
      F along = splatf(0.0f);
      sweep(features, [&](auto at) { along = fma(mulf(at.load(of, own_x), factor), at.load(work), along); });
      const F mean = splatf(-reduce_sum(along) / static_cast<float>(features));
      sweep(features, [&](auto at) {
        const F normed_x = mulf(at.load(of, own_x), factor);
        at.store(of, out, mulf(fma(normed_x, mean, at.load(work)), factor));
      });
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

constexpr BlockKernels kBlocks = {widen,    narrow,        add,  normalise, normalise_back, gain, gain_back,
                                  activate, activate_back, turn, turn_back, scale};

}  // namespace
}  // namespace arb
