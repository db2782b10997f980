"""A float matrix as trits and powers of two, with what the rounding left over.

Shapes of the package: ``N`` rows (outputs) of ``K`` columns (inputs), ``J = ceil(K / G)`` groups of
``G`` columns of a row that share an exponent.
"""

from __future__ import annotations

from typing import Final, Literal

import torch
from attrs import frozen
from torch import Tensor

from arb_ternary_interchange.decoder.scales import CELLS

#: What shares an exponent: so many columns of a row, a row, or the whole matrix.
Grouping = int | Literal["row", "tensor"]
#: What exponents may be; -127 and -128 have no normal float32.
EXPONENTS: Final = (-126, 127)


@frozen(eq=False)
class Rounded:
    """``W = (T + residue) 2**E``, of which ``T 2**E`` is what a model computes with.

    Attributes:
        trits: int8 ``[N, K]``.
        exponent: int8 ``[N, J]``; all equal where the matrix shares one.
        residue: float32 ``[N, K]``, in units of ``2**E``: what was to be rounded less its trit.
        size: ``G``.
    """

    trits: Tensor
    exponent: Tensor
    residue: Tensor
    size: int

    def dense(self) -> Tensor:
        """``T 2**E`` as float32 ``[N, K]``; exact."""
        return torch.ldexp(
            self.trits.to(torch.float32), spread(self.exponent, self.size, self.trits.shape[1])
        )

    def votes(self, bits: int) -> Tensor:
        """Accumulators of ``bits`` bits, int8 ``[N, K]``, that start with the residue:
        ``round(residue U)``.

        The default rule of votes takes a weight for ``T + A / U``, as an import of float matrices
        does (``arb_ternary_interchange.decoder.scales.ternary_rows``); ``|A| < U``, for at ``U`` a
        flip would be due.
        """
        cell = CELLS[bits]
        return (self.residue * cell).round_().clamp_(1 - cell, cell - 1).to(torch.int8)


def columns_of(grouping: Grouping, columns: int) -> int:
    """``G``."""
    return max(columns, 1) if isinstance(grouping, str) else grouping


def groups_of(weight: Tensor, grouping: Grouping) -> Tensor:
    """``weight`` with what shares an exponent in the last of three dimensions: ``[N, J, G]``, or
    ``[1, 1, N K]``.

    A last group that is not full is filled with zeros.
    """
    rows, columns = weight.shape
    if grouping == "tensor":
        return weight.reshape(1, 1, -1)
    size = columns_of(grouping, columns)
    groups = max(1, -(-columns // size))
    return torch.nn.functional.pad(weight, (0, groups * size - columns)).view(rows, groups, size)


def spread(exponent: Tensor, size: int, columns: int) -> Tensor:
    """Exponents ``[N, J]`` of groups as int32 of each column, ``[N, K]``; ``[N, 1]`` where a row
    has one.
    """
    wide = exponent.to(torch.int32)
    return wide if exponent.shape[1] == 1 else wide.repeat_interleave(size, dim=1)[:, :columns]


def nearest_trits(weight: Tensor, grouping: Grouping, exponent: Tensor) -> Rounded:
    """The trits nearest to a float matrix ``[N, K]`` at given exponents int8 ``[N, J]``."""
    columns = weight.shape[1]
    size = columns_of(grouping, columns)
    scaled = torch.ldexp(weight.to(torch.float32), -spread(exponent, size, columns))
    trits = scaled.round().clamp_(-1, 1)
    return Rounded(trits.to(torch.int8), exponent, scaled.sub_(trits), size)
