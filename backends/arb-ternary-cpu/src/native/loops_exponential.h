// exp in sixteen lanes. Included after a simd_<isa>.h.
#pragma once

#include "loops_common.h"

namespace arb {
namespace {

// exp(x) for x in -87..88, clipped to that; NaN stays NaN. The polynomial is that of expf in Cephes (Moshier); on top of
// its relative error of 2e-7 come at most three roundings where multiplications and additions are not fused.
inline F exponential(F x) {
  x = clampf(x, splatf(-87.0f), splatf(88.0f));
  const V whole = to_int(mulf(x, splatf(1.44269504088896341f)));
  const F n = to_float(whole);
  const F rest = fma(n, splatf(2.12194440e-4f), fma(n, splatf(-0.693359375f), x));
  F sum = splatf(1.9875691500e-4f);
  sum = fma(sum, rest, splatf(1.3981999507e-3f));
  sum = fma(sum, rest, splatf(8.3334519073e-3f));
  sum = fma(sum, rest, splatf(4.1665795894e-2f));
  sum = fma(sum, rest, splatf(1.6666665459e-1f));
  sum = fma(sum, rest, splatf(5.0000001201e-1f));
  return mulf(addf(fma(mulf(rest, rest), sum, rest), splatf(1.0f)), power_of_two(whole));
}

}  // namespace
}  // namespace arb
