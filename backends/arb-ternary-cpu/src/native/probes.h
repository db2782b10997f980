// What the machine can do at most: the rate at which memory is read, and that of int8 products in registers.
//
// These kernels do nothing else, so that what they reach is a limit of the machine and not of somebody's library.
#pragma once

#include <cstdint>

namespace arb {

struct ProbeKernels {
  // The sum of 64-bit words modulo 2**64; `bytes` need not be aligned.
  uint64_t (*sum_words)(const uint8_t* bytes, int64_t words);
  // `rounds` times a few sums of int8 products that do not wait for each other, with the instructions of the products.
  void (*multiply)(int64_t rounds);
  int64_t operations;  // of one round; a multiplication and an addition are two
};

const ProbeKernels& probes_scalar();
const ProbeKernels& probes_avx2();
const ProbeKernels& probes_avxvnni();
const ProbeKernels& probes_avx512vnni();
const ProbeKernels& probes_amx();
const ProbeKernels& probes_neon();

const ProbeKernels& probe_kernels(int isa);

// Reads all of `words` 64-bit words once and returns their sum modulo 2**64.
uint64_t read_words(const ProbeKernels& kernels, int threads, const uint8_t* bytes, int64_t words);

// Operations a second over all threads, measured for about `seconds`.
double int8_peak(const ProbeKernels& kernels, int threads, double seconds);

}  // namespace arb
