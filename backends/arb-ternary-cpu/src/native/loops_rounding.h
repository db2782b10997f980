// Rounded quotients without a division for each: where a product with the inverse leaves no doubt.
#pragma once

#include "loops_common.h"

namespace arb {
namespace {

// The bits of |x|; as integers they are ordered as the magnitudes are, and those of NaN come last.
inline V magnitude_bits(F f) { return bit_and(as_bits(f), splat(kMagnitudeMask)); }

// round_half_even(x / divisor) for quotients up to 127, the quotient being rounded to float32 first.
//
// x * (1 / divisor) differs from the true quotient by at most 127 * 2**-24 and, where multiplications are not fused, a
// rounding of 2**-18; the rounded quotient by another 2**-18. Together that is less than 2**-16: unless the product is
// so close to the middle between two integers, both round to the same one.
struct Rounding {
  F inverse, negative;
  bool normal;  // the inverse of a subnormal number may be infinite

  explicit Rounding(F divisor)
      : inverse(divf(splatf(1.0f), divisor)),
        negative(divf(splatf(-1.0f), divisor)),
        normal(reduce_max(choose_greater(splat(0x00800000), as_bits(divisor), splat(1), zero())) == 0) {}

  // The integer is the low byte of each lane; `worst` collects how far the products are from it.
  V quick(F x, V& worst) const {
    const F shifted = fma(x, inverse, splatf(0x1.8p23f));  // whose unit is 1
    worst = max_signed(worst, magnitude_bits(fma(x, negative, addf(shifted, splatf(-0x1.8p23f)))));
    return as_bits(shifted);
  }

  // Whether all of them are right.
  bool certain(V worst) const {
    constexpr int32_t kNearlyHalf = 0x3EFFFE00;  // 0.5 - 2**-16
    return normal && reduce_max(worst) < kNearlyHalf;
  }
};

// Rounds value(at) / scale for every place of a row, with scale = largest / 127, and returns the scale; `bits` are
// those of the largest magnitude.
template <class Value>
inline float quantize_values(int32_t bits, int64_t count, int8_t* q, Value value) {
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
  sweep(count, [&](auto at) { at.store_bytes(q, rounding.quick(value(at), worst)); });
  if (rounding.certain(worst)) return scale;
  // With a subnormal scale a quotient may exceed 127; its low byte is kept, as a conversion to int8 does.
  sweep(count, [&](auto at) { at.store_bytes(q, to_int(divf(value(at), divisor))); });
  return scale;
}

}  // namespace
}  // namespace arb
