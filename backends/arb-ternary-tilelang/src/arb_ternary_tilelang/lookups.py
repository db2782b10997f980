"""Gradients of looked-up rows turned into votes: sort ids, launch kernels.

Meaning and signatures are those of ``arb_ternary.backends.reference``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from attrs import frozen
from torch import Tensor

from arb_ternary.backends.arguments import check_ids
from arb_ternary.backends.reference_votes import count_correlation_, looked_up_rows
from arb_ternary.backends.vote_state import VoteState
from arb_ternary_tilelang.arguments import nothing, readable, require, served
from arb_ternary_tilelang.casting import (
    Scaled,
    Target,
    cast,
    scaled_of,
    target_of,
)
from arb_ternary_tilelang.kernels import votes as programs
from arb_ternary_tilelang.lane import lane_of


def kernels() -> dict[str, Callable[..., object]]:
    """Return the kernels of this module by op."""
    return {
        "embedding_votes": embedding_votes,
        "embedding_scaled_votes": embedding_scaled_votes,
    }


@frozen(eq=False)
class _Lookup:
    """The rows that were looked up and their places in the gradient; see ``looked_up_rows``."""

    names: Tensor
    order: Tensor
    starts: Tensor
    present: Tensor


def _lookup(ids_M: Tensor, rows: int) -> _Lookup:
    """Check ids, and sort them."""
    require(ids_M.dim() == 1, f"ids must be [M], got {list(ids_M.shape)}")
    check_ids(ids_M, rows)
    return _Lookup(*looked_up_rows(ids_M.to(torch.int64), rows))


def _cast_lookup(
    lookup: _Lookup,
    grad_MK: Tensor,
    target: Target,
    scaled: Scaled | None,
    learns: bool,
) -> Tensor:
    shape = target.shape
    device = target.words.device
    lane = lane_of(device)
    integer = grad_MK.dtype is torch.int8
    grad = grad_MK if integer else served(lane, grad_MK, "grad")
    size = (lookup.order.shape[0], shape.in_features)
    a = readable(grad, "grad", grad.dtype, size, device)
    operands = (a, nothing(device, torch.int8), lookup.order, lookup.starts)
    return cast(programs.LOOKUP, lane, lane.tiles.lookups, operands, target, scaled, learns)


def embedding_votes(
    ids_M: Tensor,
    grad_MK: Tensor,
    scale: Tensor | None,
    state: VoteState,
) -> None:
    """Cast sign votes of the looked-up rows; mutates what the reference mutates."""
    lookup = _lookup(ids_M, state.sizes[0])
    target = target_of(scale, state, lookup.names)
    if 0 in (ids_M.numel(), state.sizes[1]):
        return
    correlated = state.correlation is not None and state.steps is not None
    learns = correlated or state.exponent_votes is not None
    scores = _cast_lookup(lookup, grad_MK, target, None, learns)
    if state.correlation is not None and state.steps is not None:
        before = state.steps.clone()
        count_correlation_(state.correlation, state.steps, lookup.names, scores)
        # Rows that were not looked up have a score of 0, and no update to count.
        state.steps.copy_(torch.where(lookup.present[:, None], state.steps, before))


def embedding_scaled_votes(
    ids_M: Tensor,
    grad_MK: Tensor,
    scale: Tensor | None,
    state: VoteState,
) -> None:
    """Cast scaled votes of the looked-up rows.

    Mutates ``votes``, ``exponent_votes``, ``stats`` and ``magnitudes``.
    """
    lookup = _lookup(ids_M, state.sizes[0])
    target = target_of(scale, state, lookup.names)
    scaled = scaled_of(target, grad_MK, state)
    if 0 in (ids_M.numel(), state.sizes[1]):
        return
    learns = state.exponent_votes is not None
    _cast_lookup(lookup, grad_MK, target, scaled, learns)
