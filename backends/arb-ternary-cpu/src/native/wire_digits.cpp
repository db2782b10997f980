#include <algorithm>
#include <atomic>

#include "threads.h"
#include "wire.h"

namespace arb {

namespace {

// Bytes of a task: long enough to read ahead in, short enough that the sums stay in the second-level cache.
constexpr int64_t kTaskBytes = 1 << 14;

// Bytes of `count` values, and how many of them, at the front, are made of as many values as they have digits.
struct Bytes {
  Bytes(int base, int64_t count)
      : width((count + kDigits[base] - 1) / kDigits[base]),
        whole(std::max<int64_t>(0, count - (kDigits[base] - 1) * width)) {}
  int64_t width, whole;
};

// Calls `some(start, count)` for stretches of the whole bytes.
template <class F>
void each_stretch(int64_t whole, int threads, F some) {
  auto task = [&](int64_t i, int) {
    const int64_t start = i * kTaskBytes;
    some(start, std::min(kTaskBytes, whole - start));
  };
  parallel_tasks((whole + kTaskBytes - 1) / kTaskBytes, threads, task);
}

template <class Sum, class Table>
void add_all(const Table& table, int base, const uint8_t* packed, int64_t count, Sum* total, int threads) {
  const Bytes bytes(base, count);
  each_stretch(bytes.whole, threads, [&](int64_t start, int64_t some) {
    table[base](packed + start, bytes.width, some, total + start);
  });
  for (int64_t i = bytes.whole; i < bytes.width; ++i) {
    int rest = packed[i];
    for (int64_t place = i; place < count; place += bytes.width, rest /= kBase[base]) {
      total[place] = static_cast<Sum>(total[place] + rest % kBase[base] - kBase[base] / 2);
    }
  }
}

}  // namespace

const WireKernels& wire_kernels(Isa isa) {
  switch (isa) {
#if defined(ARB_HAVE_AVX2)
    case Isa::avx2:
    case Isa::avxvnni:
      return wire_kernels_avx2();
#endif
#if defined(ARB_HAVE_AVX512VNNI)
    case Isa::avx512vnni:
    case Isa::avx512bf16:
    case Isa::amx:
      return wire_kernels_avx512vnni();
#endif
#if defined(ARB_HAVE_NEON)
    case Isa::neon:
      return wire_kernels_neon();
#endif
    default:
      return wire_kernels_scalar();
  }
}

bool pack_digits(const WireKernels& kernels, int base, const int16_t* values, int64_t count, uint8_t* out,
                 int threads) {
  const Bytes bytes(base, count);
  std::atomic<bool> fits{true};
  each_stretch(bytes.whole, threads, [&](int64_t start, int64_t some) {
    if (!kernels.pack[base](values + start, bytes.width, some, out + start)) fits.store(false);
  });
  const int half = kBase[base] / 2;
  for (int64_t i = bytes.whole; i < bytes.width; ++i) {
    int byte = 0, weight = 1;
    for (int64_t j = 0; j < kDigits[base]; ++j, weight *= kBase[base]) {
      const int64_t place = i + j * bytes.width;
      const int value = place < count ? values[place] : 0;
      if (value < -half || value > half) fits.store(false);
      byte += weight * (value + half);
    }
    out[i] = static_cast<uint8_t>(byte);
  }
  return fits.load();
}

void add_digits(const WireKernels& kernels, int base, const uint8_t* packed, int64_t count, int16_t* total,
                int threads) {
  add_all(kernels.add_short, base, packed, count, total, threads);
}

void add_digits(const WireKernels& kernels, int base, const uint8_t* packed, int64_t count, int32_t* total,
                int threads) {
  add_all(kernels.add_long, base, packed, count, total, threads);
}

}  // namespace arb
