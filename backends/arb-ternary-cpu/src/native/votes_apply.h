// Flips: accumulators that have reached their threshold move trits and exponents.
#pragma once

#include <cstdint>

#include "hash.h"
#include "votes.h"

namespace arb {

struct FlipState {
  int64_t rows;
  int64_t columns;
  int bits;  // of an accumulator
  uint8_t* packed;
  uint8_t* votes;
  int64_t first_row = 0;  // of the whole weight, where these are only some of its rows
};

// Returns the number of trits that changed.
int64_t flip_trits(const FlipState& state, const VoteKernels& kernels, const FlipRule& rule, const HashWords& words,
                   int threads);

// Exponents and their votes are [rows, groups]; `origin` is read with the given strides, of which a stride along groups
// is 0 or 1. Returns the number of exponents that changed.
int64_t flip_exponents(int8_t* exponent, int8_t* votes, const int8_t* origin, int64_t row_stride, int64_t group_stride,
                       int64_t rows, int64_t groups, const VoteKernels& kernels, const ExponentRule& rule, int threads);

}  // namespace arb
