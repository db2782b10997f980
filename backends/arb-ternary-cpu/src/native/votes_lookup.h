// The votes of looked-up rows.
#pragma once

#include "votes_task.h"

namespace arb {

// Casts the votes of the rows `ids[M]` from `grad[M, K]`, the gradients of equal ids summed in their order. False, and
// nothing done, if an id is not a row.
bool cast_lookup(const CastState& state, const VoteKernels& kernels, const int64_t* ids, Element grad_type,
                 const void* grad, int64_t tokens, int threads);

}  // namespace arb
