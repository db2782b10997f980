"""Gradients of which half is orthogonalised, before votes are cast of them.

The gradient ``G = U S V^T`` of one weight in one micro-batch has a few large singular values, so that most of a vote is
about the few directions that those belong to. Muon (Jordan et al., 2024) steps by ``U V^T`` instead, in which all
directions count as much, and which needs a momentum over many steps: of one micro-batch most directions are noise. Half
of each needs none::

    H = G / |G| + O / |O|        O ~ U V^T, |.| the root of the mean square

``O`` comes of Newton and Schulz's iteration, with Muon's polynomial and three of its five rounds: singular values of
less than a fortieth of the norm, which those five would enlarge as much as any, stay small. ``H`` has the same size in
every micro-batch. Nothing is kept from one step to the next; in backward there is the whole gradient of one weight at a
time.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from arb_ternary.backends.vote_state import VoteState

__all__ = ["HEAD", "ROUNDS", "TRANSFORM", "arguments", "half_orthogonal", "orthogonalised"]

#: What a module's ``transform`` is set to.
TRANSFORM: Final = f"{__name__}:arguments"

#: What the last linear of a model is called. Its rows are classes, most of which one batch hardly knows, and it learns
#: better from its gradient as it is.
HEAD: Final = "head"

#: Of an odd polynomial that drives singular values in (0, 1] to between 0.7 and 1.2, and how often it is applied.
POLYNOMIAL: Final = (3.4445, -4.7750, 2.0315)
ROUNDS: Final = 3
#: What a norm of zeros counts as.
_TINY: Final = torch.finfo(torch.float32).tiny


def arguments(
    grad: Tensor, x: Tensor, scale: Tensor | None, state: VoteState
) -> tuple[Tensor, Tensor, None, VoteState]:
    """The arguments of a cast whose gradient is :func:`half_orthogonal` of ``G = scale * grad.T @ x``, in float32.

    One of the two matrices is the identity, of the shorter side. ``stats`` of the state count ``G`` itself, so that
    norms of gradients are what they are without.

    Args:
        grad: float or int8 ``[M, N]``.
        x: float or int8 ``[M, K]``.
        scale: float32 scalar of an int8 ``grad``.
        state: whose ``stats`` are changed, and replaced by others in what is returned.
    """
    # In bfloat16 where the run multiplies in it, as Muon does; float16 would overflow.
    kind = torch.bfloat16 if grad.dtype == torch.bfloat16 else torch.float32
    gradient = grad.to(kind).T @ x.to(kind)
    if scale is not None:
        gradient *= scale
    _count(gradient, state.stats)
    mixed = half_orthogonal(gradient)
    rows, columns = mixed.shape
    counted = state._replace(stats=torch.zeros_like(state.stats))
    if rows <= columns:
        return torch.eye(rows, device=mixed.device), mixed, None, counted
    return mixed.T.contiguous(), torch.eye(columns, device=mixed.device), None, counted


def half_orthogonal(gradient: Tensor) -> Tensor:
    """``H`` of the module's docstring, float32 ``[N, K]``, of a gradient in float32 or bfloat16.

    Of zeros it is zero. Of a gradient with a number that is not finite every element is NaN, and casts no vote.
    """
    return _even(gradient.float()).add_(_even(orthogonalised(gradient).float()))


def orthogonalised(gradient: Tensor) -> Tensor:
    """About ``U V^T`` of ``U S V^T``, in the dtype of ``gradient``: ``[N, K]``."""
    x: Tensor = gradient / gradient.float().norm().clamp_min(_TINY).to(gradient.dtype)
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    first, third, fifth = POLYNOMIAL
    for _ in range(ROUNDS):
        square = x @ x.T
        x = first * x + (third * square + fifth * square @ square) @ x
    return x.T if tall else x


def _even(matrix: Tensor) -> Tensor:
    """``matrix`` with a mean square of 1."""
    result: Tensor = matrix / matrix.square().mean().sqrt().clamp_min(_TINY)
    return result


def _count(gradient: Tensor, stats: Tensor) -> None:
    """Add the number of NaN, and the sums of squares by row and by column of all others."""
    stats[0] += gradient.isnan().sum()
    squares = gradient.float().nan_to_num(0.0, torch.inf, torch.inf).square_()
    rows = gradient.shape[0]
    stats[1 : 1 + rows] += squares.sum(dim=1)
    stats[1 + rows :] += squares.sum(dim=0)
