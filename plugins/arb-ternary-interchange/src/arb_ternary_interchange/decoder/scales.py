"""Float scales as a power of two and a remainder; float matrices as trits.

Shapes: ``N`` rows, ``K`` columns, ``J = ceil(K / G)`` groups of ``G`` columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, Literal

import torch
from attrs import frozen
from torch import Tensor

from arb_ternary.errors import DataError
from arb_ternary_interchange.decoder.published import ScaledTrits

#: The part of a matrix that shares an exponent: the whole, a row, or a number of columns of a row.
Grouping = int | Literal["row", "tensor"]

# Vote quanta per trit of the default rule, by bits of an accumulator: a weight is ``T + A / U`` in
# units of ``2**E``, and a flip is due at ``|A| >= U`` (docs/explanation/scaled-votes.md).
CELLS: Final = {8: 64, 4: 7, 2: 1}
#: Least and greatest exponent: -127 and -128 have no normal float32.
EXPONENTS: Final = (-126, 127)
_SQRT_HALF: Final = math.sqrt(0.5)
#: Rows of a float matrix that are made ternary at a time.
_ROWS: Final = 1024


@frozen(eq=False)
class Split:
    """Trits with float scales, split into powers of two and a remainder: ``W = remainder * T *
    2**E``.

    Attributes:
        trits: int8 ``[N, K]``.
        exponent: int8 ``[N, J]``, ``[N, 1]`` or ``[1, 1]``.
        group_size: columns that share an exponent.
        remainder: the factor, between ``sqrt(1/2)`` and ``sqrt(2)``, that all scales have besides a
            power of two; None if they differ in it, and ``T * 2**E`` is then only near ``W``.
        error: largest relative error of a scale that is rounded to its nearest power of two.
        row_factors: float32 ``[N]``, the remainder of each row; None if a row has several or
            float16 does not hold them.
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
        return "row" if self._one_per_row() else self.group_size

    def exponents(self, rows: int, group_size: int, groups: int) -> Tensor:
        """Return exponents int8 ``[rows, groups]`` for groups of ``group_size`` columns, which are
        at least as fine as its own.
        """
        if self._one_per_row():
            return self.exponent[:, :1].expand(rows, groups).contiguous()
        first = torch.arange(groups) * group_size // self.group_size
        return self.exponent[:, first].contiguous()

    def _one_per_row(self) -> bool:
        return bool((self.exponent == self.exponent[:, :1]).all())


def split_scales(name: str, weight: ScaledTrits) -> Split:
    """Split each scale into the power of two nearest to it, by its logarithm, and a remainder.

    A scale of 0 makes its trits 0, and a negative one turns their signs. An exponent that no scale
    decides is that of the row or, if the row has none, of the matrix.

    Args:
        name: the tensor, for errors.
        weight: its trits and scales.

    Raises:
        DataError: a scale is not finite or beyond the range of exponents, or shapes do not agree.
    """
    rows, columns = weight.trits.shape
    scale = _checked_scales(name, weight)
    group_size = columns if scale.shape[1] == 1 else weight.group_size
    trits = weight.trits
    if bool((scale <= 0).any()):
        sign = torch.sign(scale).to(torch.int8)
        if sign.shape[1] > 1:
            sign = sign.repeat_interleave(group_size, dim=1)[:, :columns]
        trits = trits * sign
        scale = scale.abs()

    mantissa, exponent = torch.frexp(scale)
    low = mantissa < _SQRT_HALF
    remainder = torch.where(low, 2 * mantissa, mantissa)
    power = exponent - low.to(exponent.dtype)
    known = scale > 0
    if not bool(known.any()):
        return Split(trits, torch.zeros(1, 1, dtype=torch.int8), columns, 1.0, 0.0)

    least = int(power[known].min())
    greatest = int(power[known].max())
    if not EXPONENTS[0] <= least <= greatest <= EXPONENTS[1]:
        raise DataError(
            f"{name}: scales from {float(scale[known].min()):.3g} to {float(scale.max()):.3g} are "
            f"beyond 2^E"
        )
    found = remainder[known]
    same = bool((found == found[0]).all())
    return Split(
        trits,
        _fill_unknown(power, known).to(torch.int8),
        group_size,
        float(found[0]) if same else None,
        float((1 / found - 1).abs().max()),
        _row_factors(remainder.expand(rows, -1), known.expand(rows, -1)),
    )


def _checked_scales(name: str, weight: ScaledTrits) -> Tensor:
    """Return the scales as float64 ``[1, 1]``, ``[N, 1]`` or ``[N, J]``."""
    rows, columns = weight.trits.shape
    scale = weight.scale.to(torch.float64)
    if scale.numel() == 1:
        scale = scale.view(1, 1)
    fits = scale.dim() == 2 and scale.shape[0] in (1, rows)
    if fits and scale.shape[1] != 1:
        fits = scale.shape[1] == max(1, -(-columns // max(weight.group_size, 1)))
    if not fits:
        raise DataError(
            f"{name}: scales of shape {tuple(weight.scale.shape)} do not fit {rows} x {columns} "
            f"trits"
        )
    if not bool(torch.isfinite(scale).all()):
        raise DataError(f"{name}: a scale is not finite")
    return scale


def _row_factors(remainder: Tensor, known: Tensor) -> Tensor | None:
    """Return the remainder of each row, 1 for a row without a scale; see :class:`Split`."""
    place = known.to(torch.int8).argmax(dim=1, keepdim=True)
    first = torch.where(known.any(dim=1), remainder.gather(1, place)[:, 0], 1.0)
    if not bool(((remainder == first.unsqueeze(1)) | ~known).all()):
        return None
    if not torch.equal(first.to(torch.float16).to(first.dtype), first):
        return None
    return first.to(torch.float32)


def _fill_unknown(power: Tensor, known: Tensor) -> Tensor:
    """Return exponents with the first known one of the row, or of the matrix, for unknown ones."""
    if bool(known.all()):
        return power
    place = known.to(torch.int8).argmax(dim=1, keepdim=True)
    first = torch.where(known.any(dim=1, keepdim=True), power.gather(1, place), power[known][0])
    return torch.where(known, power, first)


def merged_scales(
    scales: Tensor, block: int, columns: int, sizes: Sequence[int]
) -> tuple[Tensor, int]:
    """Return as few scales as there are different ones, and the columns that share one.

    A scale of 0, that of a group of zeros, agrees with every positive one.

    Args:
        scales: ``[N, J]``.
        block: columns that share a scale there.
        columns: ``K``.
        sizes: further groups that are tried, the largest first; the matrix and rows come before.
    """
    if one_magnitude(scales.view(1, 1, -1)):
        return scales.max().view(1), columns
    if one_magnitude(scales.unsqueeze(1)):
        return scales.amax(dim=1, keepdim=True), columns
    for size in sizes:
        if size % block == 0 and size < columns:
            merged = grouped(scales, size // block)
            if one_magnitude(merged):
                return merged.amax(dim=-1), size
    return scales, block


def grouped(values: Tensor, size: int) -> Tensor:
    """Return ``[N, K]`` as groups of columns ``[N, J, size]``, filled up with zeros."""
    padded = torch.nn.functional.pad(values, (0, -values.shape[1] % size))
    return padded.view(values.shape[0], -1, size)


def one_magnitude(values: Tensor) -> bool:
    """Whether every group along the last dimension holds only zeros and one other number."""
    largest = values.amax(dim=-1, keepdim=True)
    return bool(((values == largest) | (values == 0)).all())


def coarsest_grouping(found: list[Grouping]) -> Grouping:
    """Return the coarsest division that can hold matrices of all these divisions."""
    sizes = [each for each in found if isinstance(each, int)]
    if not sizes:
        return "row" if "row" in found else "tensor"
    for size in (256, 128, 64):
        if all(each % size == 0 for each in sizes):
            return size
    return 32


def ternary_rows(weight: Tensor, group_size: int, vote_bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Make a float matrix ``[N, K]`` ternary by the absmean rule of BitNet b1.58; return trits,
    exponents and accumulators, all int8.

    ``2**E`` is the power of two nearest to the mean of ``|w|`` of a group, ``T = clip(round(w /
    2**E), -1, 1)``. The default vote rule reads a weight as the number ``T + A / U`` in units of
    ``2**E``. Accumulators therefore start with the residue of the rounding, ``A = round((w / 2**E -
    T) U)``, within ``-(U - 1)..U - 1``: a weight that was rounded up by nearly a half flips back
    after votes of half a trit. With accumulators of 2 bits ``U`` is 1, and they start empty.
    """
    rows, columns = weight.shape
    cell = CELLS[vote_bits]
    groups = max(1, -(-columns // max(group_size, 1)))
    trits = torch.empty(rows, columns, dtype=torch.int8)
    votes = torch.empty(rows, columns, dtype=torch.int8)
    exponent = torch.empty(rows, groups, dtype=torch.int8)
    sizes = torch.full((groups,), group_size)
    sizes[-1] = columns - group_size * (groups - 1)

    # Some rows at a time: a sum in float64 makes a copy of what it sums.
    total = math.fsum(
        float(part.abs().sum(dtype=torch.float64)) for part in torch.split(weight, _ROWS)
    )
    mean = torch.tensor(total / max(weight.numel(), 1), dtype=torch.float64)
    fallback = torch.nan_to_num(_nearest_power(mean))

    for start in range(0, rows, _ROWS):
        some = slice(start, start + _ROWS)
        w = weight[some].to(torch.float32)
        padded = torch.nn.functional.pad(w.abs(), (0, group_size * groups - columns))
        grouped = padded.view(-1, groups, group_size)
        power = _nearest_power(grouped.sum(dim=2, dtype=torch.float64) / sizes)
        power = torch.where(torch.isnan(power), fallback, power).clamp_(*EXPONENTS)
        inverse = torch.exp2(-power).to(torch.float32).repeat_interleave(group_size, dim=1)
        scaled = w * inverse[:, :columns]
        rounded = scaled.round().clamp_(-1, 1)
        residue = scaled.sub_(rounded).mul_(cell).round_().clamp_(1 - cell, cell - 1)
        trits[some] = rounded.to(torch.int8)
        exponent[some] = power.to(torch.int8)
        votes[some] = residue.to(torch.int8)
    return trits, exponent, votes


def _nearest_power(size: Tensor) -> Tensor:
    """Return ``round(log2(size))``; NaN if size is 0."""
    power = torch.log2(size).round()
    return torch.where(torch.isfinite(power), power, torch.nan)
