"""Exponents of groups from the weights alone: by their mean, or with the least squared error."""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from arb_ternary_upcycle.projection.rounded import (
    EXPONENTS,
    Grouping,
    Rounded,
    columns_of,
    groups_of,
    nearest_trits,
)

#: Powers of two below the mean size that are tried. The optimum is not far below the mean: there
#: every weight is ``+-s``, and ``2 s`` is nearer to all that are above ``1.5 s``.
_BELOW_THE_MEAN: Final = 3


def absmean(weight: Tensor, grouping: Grouping) -> Rounded:
    """Round as BitNet b1.58 does, with a power of two for its scale.

    ``2**E`` is nearest by its logarithm to the mean of ``|w|`` of a group, and ``T = clip(round(w /
    2**E), -1, 1)``.
    """
    total = groups_of(weight.abs(), grouping).to(torch.float64).sum(dim=2)
    power = torch.log2(total / _counts(weight, grouping)).round()
    return nearest_trits(weight, grouping, _exponents(power, weight, grouping))


def least_squares(weight: Tensor, grouping: Grouping) -> Rounded:
    """Round with the least ``sum((w - T 2**E)**2)`` of each group."""
    return nearest_trits(weight, grouping, least_squares_exponents(weight, grouping))


def least_squares_exponents(
    weight: Tensor, grouping: Grouping, importance: Tensor | None = None
) -> Tensor:
    """Return the exponents of :func:`least_squares`, int8 ``[N, J]``; of equal errors the larger.

    Args:
        weight: ``[N, K]``.
        grouping: what shares an exponent.
        importance: factors of the squared errors, ``[K]``, greater than 0; None = 1.
    """
    size = groups_of(weight.abs().to(torch.float32), grouping)
    largest = size.amax(dim=2)
    mean = size.to(torch.float64).sum(dim=2) / _counts(weight, grouping)
    factor = torch.ones(())
    if importance is not None:
        factor = groups_of(importance.to(torch.float32).expand(weight.shape), grouping)
        weighted = (factor * size).to(torch.float64).sum(dim=2)
        mean = torch.minimum(mean, weighted / factor.to(torch.float64).sum(dim=2))

    top = torch.log2(largest.to(torch.float64)).ceil()
    below = (top - torch.log2(mean))[largest > 0]
    steps = 1 + _BELOW_THE_MEAN
    if below.numel():
        steps += math.ceil(float(below.max()))

    best = torch.full_like(top, torch.inf)
    chosen = top.clone()
    for step in range(steps):
        power = torch.nan_to_num(top - step, neginf=0.0)
        scale = torch.exp2(power).to(torch.float32).unsqueeze(2)
        # A weight of size a becomes 0 or s, whichever is nearer.
        squares = torch.minimum(size, (size - scale).abs_()).square_().mul_(factor)
        error = squares.sum(dim=2, dtype=torch.float64)
        better = error < best
        best = torch.where(better, error, best)
        chosen = torch.where(better, power, chosen)
    return _exponents(torch.where(largest > 0, chosen, -torch.inf), weight, grouping)


def _counts(weight: Tensor, grouping: Grouping) -> Tensor:
    """Return the number of weights in each group, ``[J]`` float64."""
    rows, columns = weight.shape
    if grouping == "tensor":
        return torch.tensor([float(max(rows * columns, 1))], dtype=torch.float64)
    size = columns_of(grouping, columns)
    groups = max(1, -(-columns // size))
    counts = torch.full((groups,), float(size), dtype=torch.float64)
    counts[-1] = max(columns - size * (groups - 1), 1)
    return counts


def _exponents(power: Tensor, weight: Tensor, grouping: Grouping) -> Tensor:
    """Return exponents int8 ``[N, J]``; a group of zeros gets that of the whole matrix's mean."""
    whole = torch.log2(weight.abs().sum(dtype=torch.float64) / max(weight.numel(), 1)).round()
    power = torch.where(torch.isfinite(power), power, torch.nan_to_num(whole, neginf=0.0))
    power = power.clamp(*EXPONENTS).to(torch.int8)
    if grouping == "tensor":
        return power.expand(weight.shape[0], 1).contiguous()
    return power
