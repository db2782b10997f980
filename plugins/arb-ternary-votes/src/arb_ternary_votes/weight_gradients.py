"""Votes cast from a function of a whole weight gradient, instead of the gradient itself.

A cast takes a product ``grad.T @ x``, which kernels never write out. Here the product is written
out, in backward, for one weight at a time. The function's result is cast as the product of itself
and the identity of its shorter side.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from arb_ternary.backends.vote_state import VoteState

#: Name of the last linear of a model. Its rows are classes, most of which hardly occur in one
#: batch, and it learns better from its gradient as it is.
HEAD: Final = "head"

#: The norm of zeros counts as this number.
TINY: Final = torch.finfo(torch.float32).tiny


def arguments_of(
    function: Callable[[Tensor], Tensor],
    grad: Tensor,
    x: Tensor,
    scale: Tensor | None,
    state: VoteState,
) -> tuple[Tensor, Tensor, None, VoteState]:
    """Return the arguments of a cast whose gradient is ``function(scale * grad.T @ x)``.

    They are float32. One of the two matrices is the identity, of the shorter side. ``stats`` of the
    state count the product itself, so norms of gradients are the same as without the function.

    Args:
        function: maps the product, float32 or bfloat16 ``[N, K]``, to float32.
        grad: float or int8 ``[M, N]``.
        x: float or int8 ``[M, K]``.
        scale: float32 scalar of an int8 ``grad``.
        state: state of the module. Its ``stats`` are changed, and the returned state has others.
    """
    # In bfloat16 if the run multiplies in it, as Muon does; float16 would overflow.
    kind = torch.bfloat16 if grad.dtype == torch.bfloat16 else torch.float32
    gradient = grad.to(kind).T @ x.to(kind)
    if scale is not None:
        gradient *= scale
    _count(gradient, state.stats)
    made = function(gradient)
    rows, columns = made.shape
    counted = state._replace(stats=torch.zeros_like(state.stats))
    if rows <= columns:
        return torch.eye(rows, device=made.device), made, None, counted
    return made.T.contiguous(), torch.eye(columns, device=made.device), None, counted


def even(matrix: Tensor) -> Tensor:
    """Return ``matrix`` scaled to a mean square of 1."""
    result: Tensor = matrix / matrix.square().mean().sqrt().clamp_min(TINY)
    return result


def _count(gradient: Tensor, stats: Tensor) -> None:
    """Add the number of NaN, and the sums of squares by row and by column of all other elements."""
    stats[0] += gradient.isnan().sum()
    squares = gradient.float().nan_to_num(0.0, torch.inf, torch.inf).square_()
    rows = gradient.shape[0]
    stats[1 : 1 + rows] += squares.sum(dim=1)
    stats[1 + rows :] += squares.sum(dim=0)
