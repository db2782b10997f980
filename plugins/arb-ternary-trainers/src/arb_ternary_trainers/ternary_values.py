"""Weights that are ternary already, as floats or packed: their trits are taken as they are."""

from __future__ import annotations

import torch
from attrs import frozen
from torch import Tensor

from arb_ternary.errors import UsageProblem
from arb_ternary.ternary.module import GroupSize
from arb_ternary_interchange.decoder.published import ScaledTrits
from arb_ternary_interchange.decoder.scales import CELLS, split_scales
from arb_ternary_interchange.huggingface.dense_ternary import ternary_parts


@frozen(eq=False)
class Initial:
    """What a ternary weight starts with: ``factor * T * 2**E``.

    Attributes:
        how: how it was found, for the report.
        trits: int8 ``[N, K]``.
        exponent: int8 ``[N, J]``.
        votes: the accumulators, int8 ``[N, K]``.
        factor: what its scales have in common besides powers of two.
    """

    how: str
    trits: Tensor
    exponent: Tensor
    votes: Tensor
    factor: float = 1.0


def ternary_values(
    name: str, matrix: Tensor, group_size: GroupSize, vote_bits: int
) -> Initial | None:
    """Return what a float matrix ``[N, K]`` holds if every group of it has one magnitude besides
    zero; None if it has other values.

    Raises:
        UsageProblem: its groups are finer than ``group_size``.
    """
    found = ternary_parts(matrix)
    if found is None:
        return None
    return scaled_trits(name, found, group_size, vote_bits)


def scaled_trits(name: str, weight: ScaledTrits, group_size: GroupSize, vote_bits: int) -> Initial:
    """Return trits as they are, and their scales as powers of two and one common factor.

    If scales have no common factor, each becomes the power of two nearest to it, and what is lost
    starts in the accumulators.

    Raises:
        UsageProblem: the groups of the weight are finer than ``group_size``.
        DataError: a scale is not finite or beyond the range of exponents.
    """
    rows, columns = weight.trits.shape
    group = max(columns, 1) if group_size == "row" else group_size
    split = split_scales(name, weight)
    grouping = split.grouping
    if isinstance(grouping, int) and grouping % group:
        raise UsageProblem(
            f"{name}: its weight is ternary in groups of {grouping} columns, and group_size is "
            f"{group_size!r}, which would round it again",
            f"Take group_size={grouping}.",
        )
    exponent = split.exponents(rows, group, -(-columns // group))
    votes = torch.zeros_like(split.trits)
    if split.remainder is None:
        cell = CELLS[vote_bits]
        scale = weight.scale.expand(rows, -1).repeat_interleave(weight.group_size, dim=1)
        power = torch.exp2(exponent.float()).repeat_interleave(group, dim=1)
        residue = scale[:, :columns].abs() / power[:, :columns] - 1
        votes = (split.trits * residue * cell).round_().clamp_(1 - cell, cell - 1).to(torch.int8)
    return Initial("exact", split.trits, exponent, votes, split.remainder or 1.0)
