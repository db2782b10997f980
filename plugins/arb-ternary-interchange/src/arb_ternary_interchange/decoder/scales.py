"""Float scales as powers of two and what they leave over; float matrices as trits.

Shapes: ``N`` rows, ``K`` columns, ``J = ceil(K / G)`` groups of ``G`` columns.
"""

from __future__ import annotations

import math
from typing import Final, Literal

import torch
from attrs import frozen
from torch import Tensor

from arb_ternary.errors import DataError
from arb_ternary_interchange.decoder.published import ScaledTrits

#: What shares an exponent: the whole matrix, a row, or so many columns of one.
Grouping = int | Literal["row", "tensor"]

# : Quanta a trit of the default rule, by bits of an accumulator: a weight is ``T + A / U`` in units
# of ``2**E``, and a : flip is due at ``|A| >= U`` (docs/explanation/scaled-votes.md).
CELLS: Final = {8: 64, 4: 7, 2: 1}
#: What exponents may be.
_EXPONENTS: Final = (-126, 127)
_SQRT_HALF: Final = math.sqrt(0.5)
#: Rows of a float matrix that are made ternary at a time.
_ROWS: Final = 1024


@frozen(eq=False)
class Split:
    """``W = remainder * T * 2**E``, of trits with float scales.

    Attributes:
        trits: int8 ``[N, K]``.
        exponent: int8 ``[N, J]``, ``[N, 1]`` or ``[1, 1]``.
        group_size: columns that share an exponent.
        remainder: the factor, between ``sqrt(1/2)`` and ``sqrt(2)``, that all scales have beside a
            power of two; None where they do not have the same one, and ``T * 2**E`` is then only
            near ``W``.
        error: largest relative error of a scale that is rounded to its nearest power of two.
        row_factors: float32 ``[N]``, as the remainder, where each row has one and float16 holds
            them; None elsewhere.
    """

    trits: Tensor
    exponent: Tensor
    group_size: int
    remainder: float | None
    error: float
    row_factors: Tensor | None = None

    @property
    def grouping(self) -> Grouping:
        """The coarsest division whose parts have one exponent each."""
        if bool((self.exponent == self.exponent[0, 0]).all()):
            return "tensor"
        rows = self.exponent.shape[1] == 1 or bool((self.exponent == self.exponent[:, :1]).all())
        return "row" if rows else self.group_size

    def exponents(self, rows: int, group_size: int, groups: int) -> Tensor:
        """Exponents int8 ``[rows, groups]`` of groups of ``group_size`` columns, at least as fine
        as its own.
        """
        if self.exponent.shape[1] == 1 or bool((self.exponent == self.exponent[:, :1]).all()):
            return self.exponent[:, :1].expand(rows, groups).contiguous()
        first = torch.arange(groups) * group_size // self.group_size
        return self.exponent[:, first].contiguous()


def split_scales(name: str, weight: ScaledTrits) -> Split:
    """The power of two nearest to each scale, by its logarithm, and the remainder; ``name`` is for
    errors.

    A scale of 0 makes its trits 0, and a negative one turns their signs; an exponent that no scale
    gives is that of the row or, where it has none, of the matrix.

    Raises:
        DataError: a scale is not finite, or beyond the range of exponents, or shapes do not agree.
    """
    trits = weight.trits
    scale = weight.scale.to(torch.float64)
    rows, columns = trits.shape
    scale = scale.view(1, 1) if scale.numel() == 1 else scale
    group_size = columns if scale.shape[1] == 1 else weight.group_size
    if (
        scale.dim() != 2
        or scale.shape[0] not in (1, rows)
        or scale.shape[1] != max(1, -(-columns // max(group_size, 1)))
    ):
        raise DataError(
            f"{name}: scales of shape {tuple(weight.scale.shape)} do not fit {rows} x {columns} "
            f"trits"
        )
    if not bool(torch.isfinite(scale).all()):
        raise DataError(f"{name}: a scale is not finite")
    if bool((scale <= 0).any()):
        sign = torch.sign(scale).to(torch.int8)
        spread = (
            sign if sign.shape[1] == 1 else sign.repeat_interleave(group_size, dim=1)[:, :columns]
        )
        trits = trits * spread
        scale = scale.abs()
    mantissa, exponent = torch.frexp(scale)
    low = mantissa < _SQRT_HALF
    rest = torch.where(low, 2 * mantissa, mantissa)
    power = exponent - low.to(exponent.dtype)
    known = scale > 0
    seen = rest[known]
    if seen.numel() and not (
        _EXPONENTS[0] <= int(power[known].min()) and int(power[known].max()) <= _EXPONENTS[1]
    ):
        raise DataError(
            f"{name}: scales from {float(scale[known].min()):.3g} to {float(scale.max()):.3g} are "
            f"beyond 2^E"
        )
    if not seen.numel():
        return Split(trits, torch.zeros(1, 1, dtype=torch.int8), columns, 1.0, 0.0)
    same = bool((seen == seen[0]).all())
    return Split(
        trits,
        _filled(power, known).to(torch.int8),
        group_size,
        float(seen[0]) if same else None,
        float((1 / seen - 1).abs().max()),
        _row_factors(rest.expand(rows, -1), known.expand(rows, -1)),
    )


def _row_factors(rest: Tensor, known: Tensor) -> Tensor | None:
    """The remainder of each row, 1 where it has no scale; see :class:`Split`."""
    first = torch.where(
        known.any(dim=1),
        rest.gather(1, known.to(torch.int8).argmax(dim=1, keepdim=True))[:, 0],
        1.0,
    )
    same = bool(((rest == first.unsqueeze(1)) | ~known).all())
    return (
        first.to(torch.float32)
        if same and torch.equal(first.to(torch.float16).to(first.dtype), first)
        else None
    )


def _filled(power: Tensor, known: Tensor) -> Tensor:
    """Exponents where unknown ones are the first known one of their row, or of the matrix."""
    if bool(known.all()):
        return power
    first = power.gather(1, known.to(torch.int8).argmax(dim=1, keepdim=True))
    first = torch.where(known.any(dim=1, keepdim=True), first, power[known][0])
    return torch.where(known, power, first)


def coarser(found: list[Grouping]) -> Grouping:
    """The coarsest division in which every matrix of these can be held."""
    groups = [each for each in found if isinstance(each, int)]
    if groups:
        return max(
            (size for size in (256, 128, 64, 32) if all(each % size == 0 for each in groups)),
            default=32,
        )
    return "row" if "row" in found else "tensor"


def ternary_rows(weight: Tensor, group_size: int, vote_bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Trits, exponents and accumulators of a float matrix ``[N, K]``, all int8, by the absmean rule
    of BitNet b1.58.

    ``2**E`` is the power of two nearest to the mean of ``|w|`` of a group, ``T = clip(round(w /
    2**E), -1, 1)``. The default rule of votes takes a weight for the number ``T + A / U`` in units
    of ``2**E``, so that accumulators start with the residue of the rounding, ``A = round((w / 2**E
    - T) U)``, within ``-(U - 1)..U - 1``: a weight that was rounded up by nearly a half flips back
    after votes of half a trit. With accumulators of 2 bits ``U`` is 1, and they start empty.
    """
    rows, columns = weight.shape
    cell = CELLS[vote_bits]
    groups = max(1, -(-columns // max(group_size, 1)))
    trits, votes = (torch.empty(rows, columns, dtype=torch.int8) for _ in range(2))
    exponent = torch.empty(rows, groups, dtype=torch.int8)
    # Some rows at a time: a sum in float64 makes a copy of what it sums.
    total = math.fsum(
        float(part.abs().sum(dtype=torch.float64)) for part in torch.split(weight, _ROWS)
    )
    fallback = _nearest_power(torch.tensor(total / max(weight.numel(), 1), dtype=torch.float64))
    sizes = torch.full((groups,), group_size)
    sizes[-1] = columns - group_size * (groups - 1)
    for start in range(0, rows, _ROWS):
        some = slice(start, start + _ROWS)
        w = weight[some].to(torch.float32)
        padded = torch.nn.functional.pad(w.abs(), (0, group_size * groups - columns))
        power = _nearest_power(
            padded.view(-1, groups, group_size).sum(dim=2, dtype=torch.float64) / sizes
        )
        power = torch.where(torch.isnan(power), torch.nan_to_num(fallback), power).clamp_(
            *_EXPONENTS
        )
        scaled = (
            w
            * torch.exp2(-power).to(torch.float32).repeat_interleave(group_size, dim=1)[:, :columns]
        )
        rounded = scaled.round().clamp_(-1, 1)
        trits[some] = rounded.to(torch.int8)
        exponent[some] = power.to(torch.int8)
        votes[some] = (
            scaled.sub_(rounded).mul_(cell).round_().clamp_(1 - cell, cell - 1).to(torch.int8)
        )
    return trits, exponent, votes


def _nearest_power(size: Tensor) -> Tensor:
    """``round(log2(size))``; NaN where size is 0."""
    power = torch.log2(size).round()
    return torch.where(torch.isfinite(power), power, torch.nan)
