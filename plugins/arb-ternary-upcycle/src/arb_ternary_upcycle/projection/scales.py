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

# : Powers of two below the mean size that are tried. An optimum far below the mean cannot be: there
# every weight is : ``+-s``, and ``2 s`` is nearer to all that are above ``1.5 s``.
_BELOW_THE_MEAN: Final = 3


def absmean(weight: Tensor, grouping: Grouping) -> Rounded:
    """``2**E`` nearest to the mean of ``|w|`` of a group by its logarithm, ``T = clip(round(w /
    2**E), -1, 1)``.

    The rule of BitNet b1.58 with a power of two for its scale.
    """
    return nearest_trits(weight, grouping, absmean_exponents(weight, grouping))


def absmean_exponents(weight: Tensor, grouping: Grouping) -> Tensor:
    """Exponents int8 ``[N, J]`` of :func:`absmean`."""
    size = groups_of(weight.abs(), grouping).to(torch.float64).sum(dim=2) / _counts(
        weight, grouping
    )
    return _filled(torch.log2(size).round(), weight, grouping)


def least_squares(weight: Tensor, grouping: Grouping) -> Rounded:
    """Trits and powers of two with the least ``sum((w - T 2**E)**2)`` of each group."""
    return nearest_trits(weight, grouping, least_squares_exponents(weight, grouping))


def least_squares_exponents(
    weight: Tensor, grouping: Grouping, importance: Tensor | None = None
) -> Tensor:
    """Exponents int8 ``[N, J]`` of :func:`least_squares`; of equal errors the larger exponent.

    Args:
        weight: ``[N, K]``.
        grouping: what shares an exponent.
        importance: factors of squared errors, ``[K]``, above 0; None = 1.
    """
    size = groups_of(weight.abs().to(torch.float32), grouping)
    largest = size.amax(dim=2)
    mean = size.to(torch.float64).sum(dim=2) / _counts(weight, grouping)
    factor = torch.ones(())
    if importance is not None:
        factor = groups_of(importance.to(torch.float32).expand(weight.shape), grouping)
        mean = torch.minimum(
            mean, (factor * size).to(torch.float64).sum(dim=2) / factor.to(torch.float64).sum(dim=2)
        )
    top = torch.log2(largest.to(torch.float64)).ceil()
    down = (top - torch.log2(mean))[largest > 0]
    steps = 1 + (math.ceil(float(down.max())) if down.numel() else 0) + _BELOW_THE_MEAN
    best = torch.full_like(top, torch.inf)
    chosen = top.clone()
    for step in range(steps):
        power = torch.nan_to_num(top - step, neginf=0.0)
        scale = torch.exp2(power).to(torch.float32).unsqueeze(2)
        # A weight of size a is 0 or s, whichever is nearer.
        error = (
            torch.minimum(size, (size - scale).abs_())
            .square_()
            .mul_(factor)
            .sum(dim=2, dtype=torch.float64)
        )
        better = error < best
        best = torch.where(better, error, best)
        chosen = torch.where(better, power, chosen)
    return _filled(torch.where(largest > 0, chosen, -torch.inf), weight, grouping)


def _counts(weight: Tensor, grouping: Grouping) -> Tensor:
    """Weights in each group, ``[J]`` float64."""
    rows, columns = weight.shape
    if grouping == "tensor":
        return torch.tensor([float(max(rows * columns, 1))], dtype=torch.float64)
    size = columns_of(grouping, columns)
    groups = max(1, -(-columns // size))
    counts = torch.full((groups,), float(size), dtype=torch.float64)
    counts[-1] = max(columns - size * (groups - 1), 1)
    return counts


def _filled(power: Tensor, weight: Tensor, grouping: Grouping) -> Tensor:
    """Exponents int8 ``[N, J]``; those of groups of zeros are that of the whole matrix's mean."""
    whole = torch.log2(weight.abs().sum(dtype=torch.float64) / max(weight.numel(), 1)).round()
    power = torch.where(torch.isfinite(power), power, torch.nan_to_num(whole, neginf=0.0))
    power = power.clamp(*EXPONENTS).to(torch.int8)
    if grouping == "tensor":
        return power.expand(weight.shape[0], 1).contiguous()
    return power
