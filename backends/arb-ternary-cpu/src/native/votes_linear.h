// The gradient of a linear's weight, tile by tile, and its votes.
#pragma once

#include "votes_task.h"

namespace arb {

// Casts the votes of grad[M, N].T @ x[M, K]. Two int8 operands are multiplied exactly, others in float32.
void cast_linear(const CastState& state, const VoteKernels& kernels, Element grad_type, const void* grad,
                 Element x_type, const void* x, int64_t tokens, int threads);

}  // namespace arb
