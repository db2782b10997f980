#include "probes.h"

#include <atomic>
#include <chrono>
#include <vector>

#include "isa.h"
#include "threads.h"

namespace arb {

namespace {

constexpr int64_t kChunkWords = int64_t{1} << 15;  // 256 KiB: long streams for the prefetchers, and an even end
constexpr int64_t kRounds = 1024;                  // some microseconds between two looks at the clock

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

}  // namespace

const ProbeKernels& probe_kernels(int isa) {
  switch (static_cast<Isa>(isa)) {
#if defined(ARB_HAVE_AVX2)
    case Isa::avx2:
      return probes_avx2();
#endif
#if defined(ARB_HAVE_AVXVNNI)
    case Isa::avxvnni:
      return probes_avxvnni();
#endif
#if defined(ARB_HAVE_AVX512VNNI)
    case Isa::avx512bf16:
    case Isa::avx512vnni:
      return probes_avx512vnni();
#endif
#if defined(ARB_HAVE_AMX)
    case Isa::amx:
      return probes_amx();
#endif
#if defined(ARB_HAVE_NEON)
    case Isa::neon:
      return probes_neon();
#endif
    default:
      return probes_scalar();
  }
}

uint64_t read_words(const ProbeKernels& kernels, int threads, const uint8_t* bytes, int64_t words) {
  std::atomic<uint64_t> total{0};
  auto read = [&](int64_t index, int) {
    const int64_t first = index * kChunkWords;
    const int64_t count = words - first < kChunkWords ? words - first : kChunkWords;
    total.fetch_add(kernels.sum_words(bytes + 8 * first, count), std::memory_order_relaxed);
  };
  parallel_tasks((words + kChunkWords - 1) / kChunkWords, threads, read);
  return total.load();
}

double int8_peak(const ProbeKernels& kernels, int threads, double seconds) {
  // A thread's rate is over the time that it has run itself. Where fewer threads are to be had, the tasks that are left
  // start after the end and count nothing.
  std::vector<double> rates(static_cast<size_t>(threads), 0.0);
  const Clock::time_point start = Clock::now();
  auto run = [&](int64_t index, int) {
    if (index > 0 && seconds_since(start) >= seconds) return;
    const Clock::time_point own = Clock::now();
    int64_t rounds = 0;
    do {
      kernels.multiply(kRounds);
      rounds += kRounds;
    } while (seconds_since(start) < seconds);
    rates[static_cast<size_t>(index)] =
        static_cast<double>(rounds) * static_cast<double>(kernels.operations) / seconds_since(own);
  };
  parallel_tasks(threads, threads, run);
  double total = 0.0;
  for (const double rate : rates) total += rate;
  return total;
}

}  // namespace arb
