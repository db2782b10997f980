"""The op of a whole weight as a float matrix, whose gradient casts votes.

Layers that multiply their packed weight themselves never need it. Everything else that reads the
``weight`` of a layer does: convolutions, attention of torch, models that look up ``weight.dtype``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from arb_ternary.backends.dispatch import kernel
from arb_ternary.backends.layout import power_of_two, spread_over_columns
from arb_ternary.backends.ops import cast_votes, quantize_gradient
from arb_ternary.backends.registration import op
from arb_ternary.backends.vote_state import VoteState
from arb_ternary.counters.hashing import USE_VOTES
from arb_ternary.ternary.module import TernaryModule


@op()
def dense_weight(
    anchor: Tensor | None, state: VoteState, dtype: torch.dtype, gradients: str
) -> Tensor:
    """``T * 2**E`` as ``[N, K]`` in ``dtype``. Backward casts votes if ``anchor`` is given."""
    trits: Tensor = kernel(state.backend, "unpack")(state.weight, state.shape)
    scale = spread_over_columns(power_of_two(state.exponent), state.shape)
    return (trits * scale).to(dtype)


@dense_weight.register_fake
def _(anchor: object, state: VoteState, dtype: torch.dtype, *_: object) -> Tensor:
    size = (state.sizes[0], state.sizes[1])
    return state.weight.new_empty(size, dtype=dtype)


def _setup(
    ctx: Any, output: Tensor, anchor: object, state: VoteState, dtype: object, gradients: str
) -> None:
    ctx.casts = anchor is not None
    ctx.gradients = gradients
    ctx.state = state


def _backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
    """Cast votes from the gradient of the weight, as the product of itself and an identity."""
    if not ctx.casts:
        return ()
    state: VoteState = ctx.state
    gradient = grad.contiguous()
    scale = None
    if ctx.gradients == "int8":
        gradient, scale = quantize_gradient(gradient, state.control, USE_VOTES, state.backend)
    rows, columns = gradient.shape
    identity = torch.eye(min(rows, columns), dtype=gradient.dtype, device=gradient.device)
    if rows <= columns:
        cast_votes(identity, gradient, scale, *state)
    else:
        cast_votes(gradient.T.contiguous(), identity, scale, *state)
    return ()


dense_weight.register_autograd(_backward, setup_context=_setup)


def weight_of(module: TernaryModule, dtype: torch.dtype) -> Tensor:
    """Return the weight of ``module`` as a float matrix ``[N, K]``; backward casts its votes."""
    anchor = module.vote_anchor()
    weight: Tensor = dense_weight(anchor, *module.vote_state(), dtype, module.gradients)
    if anchor is not None:
        module.expect_votes(weight)
    return weight
