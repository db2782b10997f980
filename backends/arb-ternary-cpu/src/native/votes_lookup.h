// The votes of looked-up rows.
#pragma once

#include "votes_task.h"

namespace arb {

// Casts the votes of the rows `ids[M]` from `grad[M, K]`, the gradients of equal ids summed in their order. False, and
// nothing done, if an id is not a row.
bool cast_lookup(const CastState& state, const VoteKernels& kernels, const int64_t* ids, Element grad_type,
                 const void* grad, int64_t tokens, int threads);

// Casts the votes of all rows, each from one gradient of all its columns: those of cast_lookup for grad[N, K] that repeats
// `grad[N]` in every column.
void cast_repeated(const CastState& state, const VoteKernels& kernels, const float* grad);
// values[N] = 1 + the sum of each row of a weight with one exponent a row.
void sum_rows(const uint8_t* packed, const int8_t* exponent, int64_t rows, int64_t columns, float* values);

}  // namespace arb
