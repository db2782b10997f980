// exp in sixteen lanes. Included after a simd_<isa>.h.
#pragma once

#include "loops_common.h"

namespace arb {
namespace {

// exp(x) for x in -87..87, clipped to that; NaN stays NaN. With x = n log(2) + r the polynomial gives exp(r) with a
// relative error of 1.1e-7, to which a few roundings are added.
inline F exponential(F x) {
  x = clampf(x, splatf(-87.0f), splatf(87.0f));
  // A sum of this size is an integer, whose low byte is the exponent field of 2**n.
  const F magic = splatf(0x1.8p23f + 127.0f);
  const F shifted = fma(x, splatf(1.44269504088896341f), magic);
  const F n = addf(shifted, negative(magic));
  const F rest = fma(n, splatf(2.12194440e-4f), fma(n, splatf(-0.693359375f), x));
  F sum = splatf(8.3124302e-3f);
  sum = fma(sum, rest, splatf(4.1890991e-2f));
  sum = fma(sum, rest, splatf(1.6667119e-1f));
  sum = fma(sum, rest, splatf(4.9999225e-1f));
  sum = fma(sum, rest, splatf(1.0f));
  sum = fma(sum, rest, splatf(1.0f));
  return mulf(sum, as_float(shift_left<23>(as_bits(shifted))));
}

inline F logistic(F x) { return reciprocal(addf(splatf(1.0f), exponential(negative(x)))); }

}  // namespace
}  // namespace arb
