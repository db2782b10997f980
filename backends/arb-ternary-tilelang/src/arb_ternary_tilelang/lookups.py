"""Gradients of looked-up rows turned into votes: ids sorted, kernels launched.

Meaning and signatures are those of ``arb_ternary.backends.reference``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from attrs import frozen
from torch import Tensor

from arb_ternary.backends.reference_votes import count_correlation_
from arb_ternary.backends.vote_state import VoteState
from arb_ternary_tilelang.arguments import FLOATS, readable, require
from arb_ternary_tilelang.casting import Scaled, Target, launch, scaled_of, served, settle, target_of
from arb_ternary_tilelang.kernels import votes as programs
from arb_ternary_tilelang.lanes import lane_of

__all__ = ["kernels"]


def kernels() -> dict[str, Callable[..., object]]:
    """The kernels of this module."""
    return {"embedding_votes": embedding_votes, "embedding_scaled_votes": embedding_scaled_votes}


@frozen(eq=False)
class _Lookup:
    """Which rows were looked up: distinct, ascending; and where in the gradient each of them is."""

    names: Tensor
    order: Tensor
    starts: Tensor


def _lookup(ids_M: Tensor, rows: int) -> _Lookup:
    """Raises IndexError where an id is outside ``0 .. rows - 1``."""
    require(ids_M.dim() == 1, f"ids must be [M], got {list(ids_M.shape)}")
    names, position, counts = torch.unique(ids_M, return_inverse=True, return_counts=True)
    if names.numel() and (int(names[0]) < 0 or int(names[-1]) >= rows):
        raise IndexError(f"ids must be in 0..{rows - 1}, got {int(names[0])}..{int(names[-1])}")
    # Stable: the gradients of an id are added in the order in which they stand.
    order = torch.argsort(position, stable=True)
    starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    return _Lookup(names.to(torch.int64), order, starts)


def _cast_lookup(lookup: _Lookup, grad_MK: Tensor, target: Target, scaled: Scaled | None, learns: bool) -> Tensor:
    shape, device = target.shape, target.words.device
    lane = lane_of(device)
    integer = grad_MK.dtype is torch.int8
    grad = grad_MK if integer else served(lane, grad_MK, "grad")
    a = readable(grad, "grad", grad.dtype, (lookup.order.shape[0], shape.in_features), device)
    kind = lane.option(programs.SIGN if scaled is None else scaled.kind)
    grad_name, learns = FLOATS.get(a.dtype, "int8"), learns or not lane.cuda
    rule = programs.Rule(programs.LOOKUP, kind, grad_name, "int8", shape.vote_bits, learns)
    none = torch.empty(0, dtype=torch.int8, device=device)
    scores = launch(lane, lane.lookup_tiles, rule, a, none, lookup.order, lookup.starts, target, scaled)
    settle(lane, scores, target, scaled)
    return scores


def embedding_votes(ids_M: Tensor, grad_MK: Tensor, scale: Tensor | None, state: VoteState) -> None:
    """Sign votes of the looked-up rows; mutates what the reference mutates."""
    lookup = _lookup(ids_M, state.sizes[0])
    target = target_of(scale, state, lookup.names)
    if 0 in (ids_M.numel(), state.sizes[1]):
        return
    correlated = state.correlation is not None and state.steps is not None
    scores = _cast_lookup(lookup, grad_MK, target, None, correlated or state.exponent_votes is not None)
    if state.correlation is not None and state.steps is not None:
        count_correlation_(state.correlation, state.steps, lookup.names, scores)


def embedding_scaled_votes(ids_M: Tensor, grad_MK: Tensor, scale: Tensor | None, state: VoteState) -> None:
    """Scaled votes of the looked-up rows; mutates ``votes``, ``exponent_votes``, ``stats`` and ``magnitudes``."""
    lookup = _lookup(ids_M, state.sizes[0])
    target = target_of(scale, state, lookup.names)
    scaled = scaled_of(target, grad_MK, state)
    if 0 in (ids_M.numel(), state.sizes[1]):
        return
    _cast_lookup(lookup, grad_MK, target, scaled, state.exponent_votes is not None)
