// Rounds of a check, drawn from seeds: the numbers of one, and what runs a number of them, or one for a fuzzer's input.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "isa.h"
#include "threads.h"

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}

  int64_t within(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(engine_); }

  template <class T>
  std::vector<T> numbers(int64_t count, int64_t low, int64_t high) {
    std::vector<T> made(static_cast<size_t>(count));
    for (T& number : made) number = static_cast<T>(within(low, high));
    return made;
  }

 private:
  std::mt19937_64 engine_;
};

using Round = void (*)(uint64_t seed);

inline int fuzz_round(Round round, const uint8_t* data, size_t size) {
  uint64_t seed = 0x9E3779B97F4A7C15ull;
  for (size_t i = 0; i < size; ++i) seed = (seed ^ data[i]) * 0xBF58476D1CE4E5B9ull + 1;
  round(seed);
  return 0;
}

inline int run_rounds(Round round, int argc, char** argv) {
  arb::prepare_threads();
  const int64_t rounds = argc > 1 ? std::atoll(argv[1]) : 100;
  const uint64_t first = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 0;
  for (int64_t i = 0; i < rounds; ++i) round(first + static_cast<uint64_t>(i));
  std::printf("%lld rounds, seeds from %llu:", static_cast<long long>(rounds), static_cast<unsigned long long>(first));
  for (const arb::Isa isa : arb::usable_isas()) std::printf(" %s", arb::isa_name(isa));
  std::printf("\n");
  return 0;
}
