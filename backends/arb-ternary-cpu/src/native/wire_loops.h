// The inner loops of the wire, written for the compiler to vectorise: one translation unit for each instruction set.
#pragma once

#include <algorithm>
#include <cstdint>

#include "wire.h"

namespace arb {
namespace {

// rest / base for a byte, as a product that fits 16 bits: compilers divide vectors of small integers one by one.
template <int kIndex>
constexpr uint16_t quotient(uint16_t rest) {
  constexpr unsigned kFactor[kBases] = {171, 205, 137, 1};
  constexpr unsigned kShift[kBases] = {9, 10, 11, 15};
  return static_cast<uint16_t>(static_cast<uint16_t>(rest * kFactor[kIndex]) >> kShift[kIndex]);
}

template <int kIndex>
constexpr bool divides() {
  for (unsigned rest = 0; rest < 256; ++rest) {
    if (quotient<kIndex>(static_cast<uint16_t>(rest)) != rest / static_cast<unsigned>(kBase[kIndex])) return false;
  }
  return true;
}
static_assert(divides<0>() && divides<1>() && divides<2>(), "the factors divide every byte");

template <int kIndex>
bool pack(const int16_t* __restrict values, int64_t width, int64_t count, uint8_t* __restrict out) {
  constexpr int kHalf = kBase[kIndex] / 2;
  uint16_t largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    uint16_t byte = 0;
#pragma GCC unroll 5
    for (int j = kDigits[kIndex] - 1; j >= 0; --j) {
      const uint16_t digit = static_cast<uint16_t>(values[i + j * width] + kHalf);
      largest = digit > largest ? digit : largest;
      byte = static_cast<uint16_t>(byte * kBase[kIndex] + digit);
    }
    out[i] = static_cast<uint8_t>(byte);
  }
  return largest < kBase[kIndex];
}

// Bytes that are taken apart at a time; their digits stay in the first-level cache.
constexpr int64_t kApart = 1024;

template <int kIndex, class Sum>
void add(const uint8_t* __restrict packed, int64_t width, int64_t count, Sum* __restrict total) {
  constexpr int kEach = kDigits[kIndex];
  constexpr int kHalf = kBase[kIndex] / 2;
  uint8_t digits[kEach][kApart];
  for (int64_t start = 0; start < count; start += kApart) {
    const int64_t some = std::min(kApart, count - start);
    for (int64_t i = 0; i < some; ++i) {
      uint16_t rest = packed[start + i];
#pragma GCC unroll 5
      for (int j = 0; j < kEach - 1; ++j) {
        const uint16_t above = quotient<kIndex>(rest);
        digits[j][i] = static_cast<uint8_t>(rest - above * kBase[kIndex]);
        rest = above;
      }
      digits[kEach - 1][i] = static_cast<uint8_t>(rest);
    }
    for (int j = 0; j < kEach; ++j) {
      Sum* sums = total + j * width + start;
      for (int64_t i = 0; i < some; ++i) sums[i] = static_cast<Sum>(sums[i] + digits[j][i] - kHalf);
    }
  }
}

// Sums are looked at so many at a time: those of which 32 bits hold a fraction go eight or sixteen to a register.
constexpr int64_t kLookedAt = 2048;
constexpr int32_t kSmall = 127;

template <class Sum>
void quanta(const Sum* __restrict sums, int64_t count, const VoteUnit& unit, uint32_t hash, int32_t* __restrict out) {
  const int32_t whole = unit.whole, fraction = unit.fraction;
  for (int64_t start = 0; start < count; start += kLookedAt) {
    const int64_t some = std::min(kLookedAt, count - start);
    const Sum* from = sums + start;
    int32_t* to = out + start;
    const uint32_t first = hash + static_cast<uint32_t>(start) * kHashStep;
    int32_t low = 0, high = 0;
    for (int64_t i = 0; i < some; ++i) {
      low = std::min<int32_t>(low, from[i]);
      high = std::max<int32_t>(high, from[i]);
    }
    if (low >= -kSmall && high <= kSmall) {
      for (int32_t i = 0; i < static_cast<int32_t>(some); ++i) {
        const uint32_t noise = hash_finish(first + static_cast<uint32_t>(i) * kHashStep) >> 8;
        const int32_t sum = from[i];
        to[i] = ((sum * fraction + static_cast<int32_t>(noise)) >> 24) + sum * whole;
      }
    } else {
      for (int64_t i = 0; i < some; ++i) {
        const int64_t noise = hash_finish(first + static_cast<uint32_t>(i) * kHashStep) >> 8;
        const int64_t sum = from[i], worth = ((sum * fraction + noise) >> 24) + sum * whole;
        to[i] = static_cast<int32_t>(std::min<int64_t>(std::max<int64_t>(worth, INT32_MIN), INT32_MAX));
      }
    }
  }
}

template <class Sum>
void settle(const Sum* __restrict whole, int64_t count, VoteRange range, int8_t* __restrict votes) {
  // What is beyond twice the range of an accumulator clips it anyway, and does not leave 16 bits.
  constexpr Sum kMost = 512;
  const int16_t low = static_cast<int16_t>(range.low), high = static_cast<int16_t>(range.high);
  for (int64_t i = 0; i < count; ++i) {
    const Sum bounded = std::min<Sum>(std::max<Sum>(whole[i], -kMost), kMost);
    const int16_t settled = static_cast<int16_t>(static_cast<int16_t>(bounded) + votes[i]);
    votes[i] = static_cast<int8_t>(std::min<int16_t>(std::max<int16_t>(settled, low), high));
  }
}

constexpr WireKernels kWire = {{pack<0>, pack<1>, pack<2>, pack<3>},
                               {add<0, int16_t>, add<1, int16_t>, add<2, int16_t>, add<3, int16_t>},
                               {add<0, int32_t>, add<1, int32_t>, add<2, int32_t>, add<3, int32_t>},
                               quanta<int16_t>,
                               quanta<int32_t>,
                               settle<int16_t>,
                               settle<int32_t>};

}  // namespace
}  // namespace arb
