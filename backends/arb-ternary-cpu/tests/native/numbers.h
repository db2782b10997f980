// Elements of any dtype said plainly, in double: what kernels read and write, and how far rounding may move it.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "products.h"
#include "rounds.h"

struct Format {
  int digits;  // of the fraction
  int lowest;  // exponent of normal numbers
  double largest;

  explicit Format(arb::Dtype dtype) : digits(23), lowest(-126), largest(FLT_MAX) {
    if (dtype == arb::Dtype::bfloat16) digits = 7, largest = 0x1.fep127;
    if (dtype == arb::Dtype::float16) digits = 10, lowest = -14, largest = 65504.0;
  }

  // The distance of neighbours at x.
  double unit(double x) const {
    return std::ldexp(1.0, (x == 0.0 ? lowest : std::max(std::ilogb(x), lowest)) - digits);
  }
};

inline double nearest(double x, arb::Dtype dtype) {
  if (x == 0.0 || !std::isfinite(x)) return x;
  const Format format(dtype);
  const double unit = format.unit(x), rounded = std::nearbyint(x / unit) * unit;
  return std::abs(rounded) > format.largest ? std::copysign(HUGE_VAL, x) : rounded;
}

// Memory of exactly so many elements.
class Tensor {
 public:
  Tensor(arb::Dtype dtype, int64_t count)
      : dtype_(dtype), bytes_(static_cast<size_t>(count * arb::dtype_size(dtype)), '\x5a') {}

  // Numbers of one magnitude; now and then nothing but zeros; or, `any`, bits at random.
  Tensor(Random& random, arb::Dtype dtype, int64_t count, bool any) : Tensor(dtype, count) {
    if (any) {
      for (char& byte : bytes_) byte = static_cast<char>(random.within(-128, 127));
      return;
    }
    const double unit = random.within(0, 9) == 0 ? 0.0 : std::ldexp(0.01, static_cast<int>(random.within(-4, 2)));
    for (int64_t i = 0; i < count; ++i) set(i, static_cast<double>(random.within(-1000, 1000)) * unit);
  }

  arb::Dtype dtype() const { return dtype_; }
  int64_t size() const { return static_cast<int64_t>(bytes_.size()) / arb::dtype_size(dtype_); }
  void* data() { return bytes_.data(); }
  const void* data() const { return bytes_.data(); }
  float* floats() { return reinterpret_cast<float*>(bytes_.data()); }
  const float* floats() const { return reinterpret_cast<const float*>(bytes_.data()); }
  // The same bits; which bits a NaN has is left to the compiler, which may exchange operands.
  bool operator==(const Tensor& other) const {
    if (bytes_ == other.bytes_ || bytes_.size() != other.bytes_.size()) return bytes_.size() == other.bytes_.size();
    for (int64_t i = 0; i < size(); ++i) {
      const double one = (*this)[i], two = other[i];
      if ((one != two || std::signbit(one) != std::signbit(two)) && (one == one || two == two)) return false;
    }
    return true;
  }

  double operator[](int64_t i) const {
    if (dtype_ == arb::Dtype::float32) return floats()[i];
    uint16_t word;
    std::memcpy(&word, bytes_.data() + 2 * i, 2);
    if (dtype_ == arb::Dtype::bfloat16) {
      const uint32_t bits = static_cast<uint32_t>(word) << 16;
      float value;
      std::memcpy(&value, &bits, 4);
      return value;
    }
    const int exponent = word >> 10 & 31, fraction = word & 1023;
    const double size = exponent == 31  ? (fraction == 0 ? HUGE_VAL : std::nan(""))
                        : exponent == 0 ? std::ldexp(fraction, -24)
                                        : std::ldexp(1024 + fraction, exponent - 25);
    return (word >> 15) != 0 ? -size : size;
  }

  // Rounds to the dtype.
  void set(int64_t i, double value) {
    value = nearest(value, dtype_);
    if (dtype_ == arb::Dtype::float32) {
      floats()[i] = static_cast<float>(value);
      return;
    }
    const float wide = static_cast<float>(value);
    uint32_t bits;
    std::memcpy(&bits, &wide, 4);
    uint16_t word = static_cast<uint16_t>(bits >> 16);
    if (dtype_ == arb::Dtype::float16) {
      const double size = std::abs(value);
      const int exponent = size < 0x1p-14 ? -14 : std::isinf(value) ? 16 : std::ilogb(value);
      // The hidden bit adds one to the exponent of normal numbers.
      const double fraction = std::isinf(value) ? 1024.0 : std::ldexp(size, 10 - exponent);
      word = static_cast<uint16_t>((word & 0x8000) + ((exponent + 14) << 10) + static_cast<int>(fraction));
    }
    std::memcpy(bytes_.data() + 2 * i, &word, 2);
  }

 private:
  arb::Dtype dtype_;
  std::vector<char> bytes_;
};

// Whether `got` is an element of the dtype next to a number at most `slack` away from `wanted`.
inline bool close(double got, double wanted, double slack, arb::Dtype dtype) {
  const Format format(dtype);
  if (std::abs(wanted) + slack > format.largest) return true;
  return std::abs(got - wanted) <= slack + 0.5 * format.unit(std::abs(wanted) + slack);
}

// What sums of `count` terms in float32, sixteen lanes wide, may be off by, relative to the sum of their magnitudes; a
// few roundings beside.
inline double sum_error(int64_t count) { return (static_cast<double>(count) / 16.0 + 16.0) * 0x1p-24; }

// Sums of rows added up by position in float32, and how far from them a kernel may be: each term by `off`, and by its
// roundings and those of the sum.
struct RowSums {
  std::vector<double> values, slack;

  explicit RowSums(int64_t count) : values(static_cast<size_t>(count)), slack(values) {}
  void add(int64_t i, double term, double off, int64_t terms) {
    values[static_cast<size_t>(i)] += term;
    slack[static_cast<size_t>(i)] += off + (static_cast<double>(terms) + 8.0) * 0x1p-24 * std::abs(term);
  }
  bool are(const Tensor& got) const {
    for (int64_t i = 0; i < got.size(); ++i) {
      const size_t at = static_cast<size_t>(i);
      if (!close(got[i], values[at], slack[at], arb::Dtype::float32)) return false;
    }
    return true;
  }
};

// r (g - y mean(g y)) for y = r x, and how far float32 may be from it, `error` being the share that x is off by, and
// `off` what g is.
struct Back {
  std::vector<double> values, slack;

  template <class G, class X>
  Back(G g, X x, double r, int64_t count, double error = 0.0, double off = 0.0) {
    double mean = 0.0, magnitude = 0.0, size = 0.0;
    for (int64_t i = 0; i < count; ++i) {
      mean += g(i) * x(i) * r / static_cast<double>(count);
      magnitude += std::abs(g(i) * x(i) * r) / static_cast<double>(count);
      size += std::abs(x(i) * r) / static_cast<double>(count);
    }
    for (int64_t i = 0; i < count; ++i) {
      values.push_back(r * (g(i) - x(i) * r * mean));
      const double y = std::abs(x(i) * r);
      slack.push_back(r * ((std::abs(g(i)) + y * magnitude) * 2.0 * (sum_error(count) + error) + off * (1.0 + y * size)));
    }
  }
};
