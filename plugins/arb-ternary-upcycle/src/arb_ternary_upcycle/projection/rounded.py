"""A float matrix as trits and powers of two, with the residue of rounding.

Shapes of the package: ``N`` rows (outputs), ``K`` columns (inputs), ``G`` columns of a row that
share an exponent, ``J = ceil(K / G)`` such groups in a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

import torch
from attrs import frozen
from torch import Tensor

from arb_ternary_interchange.decoder.scales import CELLS

#: What shares an exponent: that many columns of a row, a row, or the whole matrix.
Grouping = int | Literal["row", "tensor"]
#: Smallest and largest exponent; 2**-127 and 2**-128 are not normal float32 numbers.
EXPONENTS: Final = (-126, 127)


@frozen(eq=False)
class Rounded:
    """``W = (T + residue) 2**E``; a model computes with ``T 2**E``.

    Attributes:
        trits: int8 ``[N, K]``.
        exponent: int8 ``[N, J]``; all equal if the matrix shares one.
        residue: float32 ``[N, K]``, in units of ``2**E``.
        size: ``G``.
    """

    trits: Tensor
    exponent: Tensor
    residue: Tensor
    size: int

    def dense(self) -> Tensor:
        """Return ``T 2**E`` as float32 ``[N, K]``; exact."""
        exponent = spread(self.exponent, self.size, self.trits.shape[1])
        return torch.ldexp(self.trits.to(torch.float32), exponent)

    def votes(self, bits: int) -> Tensor:
        """Return accumulators of ``bits`` bits that hold the residue, int8 ``[N, K]``.

        With ``U`` votes to a flip they are ``round(residue U)``, as in an import of float matrices
        (``arb_ternary_interchange.decoder.scales.ternary_rows``). Their magnitude is less than
        ``U``, at which the trit would have to flip.
        """
        cell = CELLS[bits]
        return (self.residue * cell).round_().clamp_(1 - cell, cell - 1).to(torch.int8)

    def split(self, sizes: Sequence[int]) -> list[Rounded]:
        """Split into matrices of ``sizes`` rows each."""
        parts = zip(
            torch.split(self.trits, list(sizes)),
            torch.split(self.exponent, list(sizes)),
            torch.split(self.residue, list(sizes)),
            strict=True,
        )
        return [Rounded(trits, exponent, residue, self.size) for trits, exponent, residue in parts]


def joined(parts: Sequence[Rounded]) -> Rounded:
    """Stack matrices of the same columns."""
    return Rounded(
        torch.cat([part.trits for part in parts]),
        torch.cat([part.exponent for part in parts]),
        torch.cat([part.residue for part in parts]),
        parts[0].size,
    )


def columns_of(grouping: Grouping, columns: int) -> int:
    """Return ``G``."""
    return max(columns, 1) if isinstance(grouping, str) else grouping


def groups_of(weight: Tensor, grouping: Grouping) -> Tensor:
    """Return ``weight`` with what shares an exponent in the last of three dimensions.

    That is ``[N, J, G]``, with a last group filled up with zeros, or ``[1, 1, N K]``.
    """
    rows, columns = weight.shape
    if grouping == "tensor":
        return weight.reshape(1, 1, -1)
    size = columns_of(grouping, columns)
    groups = max(1, -(-columns // size))
    return torch.nn.functional.pad(weight, (0, groups * size - columns)).view(rows, groups, size)


def spread(exponent: Tensor, size: int, columns: int) -> Tensor:
    """Return the exponent of each column, int32 ``[N, K]``; ``[N, 1]`` if a row has only one."""
    wide = exponent.to(torch.int32)
    return wide if exponent.shape[1] == 1 else wide.repeat_interleave(size, dim=1)[:, :columns]


def spread_transposed(values_JR: Tensor, size: int, columns: int) -> Tensor:
    """Return the values of each column from those of its group, ``[K, R]``; ``[1, R]`` for one."""
    if values_JR.shape[0] == 1:
        return values_JR
    return values_JR.repeat_interleave(size, dim=0)[:columns]


def nearest_trits(weight: Tensor, grouping: Grouping, exponent: Tensor) -> Rounded:
    """Round a float matrix ``[N, K]`` at given exponents, int8 ``[N, J]``."""
    columns = weight.shape[1]
    size = columns_of(grouping, columns)
    scaled = torch.ldexp(weight.to(torch.float32), -spread(exponent, size, columns))
    trits = scaled.round().clamp_(-1, 1)
    return Rounded(trits.to(torch.int8), exponent, scaled.sub_(trits), size)
