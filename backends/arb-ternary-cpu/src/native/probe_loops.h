// The loops of ProbeKernels. Included by one translation unit for each instruction set, after its simd_<isa>.h and
//
//   kVectorBytes    of a register
//   kSums           accumulators that fit into the registers and are enough to hide an instruction's latency
//   add_products    a sum with the products of bytes in every lane added, by the instructions of the products
//   opaque(V&)      nothing, but the compiler takes the value for changed
//
// Everything has internal linkage, as in products_loops.h.
#pragma once

#include <cstdint>
#include <cstring>

#include "probes.h"

namespace arb {
namespace {

typedef uint64_t Words __attribute__((vector_size(kVectorBytes)));

uint64_t sum_words(const uint8_t* bytes, int64_t words) {
  constexpr int64_t kLanes = kVectorBytes / 8, kParts = 256 / kVectorBytes, kAhead = 4096;
  Words sums[kParts] = {};
  int64_t done = 0;
  for (; done + kParts * kLanes <= words; done += kParts * kLanes) {
    const uint8_t* const from = bytes + 8 * done;
    for (int64_t line = 0; line < 256; line += 64) __builtin_prefetch(from + kAhead + line);
    for (int64_t i = 0; i < kParts; ++i) {
      Words part;
      std::memcpy(&part, from + i * kVectorBytes, kVectorBytes);
      sums[i] += part;
    }
  }
  uint64_t total = 0;
  for (const Words& sum : sums) {
    for (int64_t lane = 0; lane < kLanes; ++lane) total += sum[lane];
  }
  for (; done < words; ++done) {
    uint64_t word;
    std::memcpy(&word, bytes + 8 * done, 8);
    total += word;
  }
  return total;
}

void multiply(int64_t rounds) {
  V sums[kSums], weights = splat(0x01010101);
  const V x = splat(0x02020202);
#pragma GCC unroll 16
  for (V& sum : sums) sum = zero();
  for (int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 16
    for (int j = 0; j < kSums; ++j) {
      // Products of the same operands would be computed once for all sums, and once for all rounds.
      opaque(weights);
      sums[j] = add_products(sums[j], weights, x);
    }
  }
#pragma GCC unroll 16
  for (V& sum : sums) opaque(sum);
}

// Sixteen lanes of four products: 64 multiplications and as many additions.
constexpr ProbeKernels kProbes = {sum_words, multiply, 2 * 64 * kSums};

}  // namespace
}  // namespace arb
