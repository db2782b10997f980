"""Running magnitudes of a gradient by row and column, and the scales of votes that follow.

Magnitudes are fixed-point logarithms.

The normaliser of element ``g[n, k]`` is ``r_n * c_k / m``, with ``r_n`` the mean of ``|g|`` over
row ``n``, ``c_k`` that over column ``k`` and ``m`` the mean of all: the factored estimate of
Adafactor (Shazeer and Stern, 2018), of first absolute instead of second moments. A sum of absolute
integers is an exact integer of at most 44 bits, which a sum of squares is not; on the same
gradients both train equally well.

State is int16, in units of 1/256 of a factor of two. The logarithm of a float32 is read off its
bits (Mitchell, 1962): ``log2(2**e * (1 + f)) ~ e + f``, at most 0.086 too small. With ``l`` the
logarithm of this step's mean and ``b`` the weight of a step in units of 2**-16::

    L = L + ((l - L) * b + 2**15 >> 16)

Rows or columns without a gradient keep their value. Everything is integer arithmetic, the same on
every machine.

A step can have several micro-batches, and an optimizer that puts steps off does not say beforehand
how many.
Means are those of one micro-batch, and votes are spread: with ``n`` the micro-batches of the last
step, the ``i``-th of the next one has votes of ``1 / max(n, i)`` of a step's size. As many as last
time make one step's votes; 64 instead of 1 make 4.7 times as many, not 64 times.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Final

import torch
from torch import Tensor

#: Units per factor of two.
FRACTION: Final = 256
#: ``E|x| / sqrt(E x**2)`` of a Gaussian: turns a mean of absolute values into a standard deviation.
_GAUSSIAN: Final = math.sqrt(2.0 / math.pi)
#: Largest right shift of an integer gradient.
_MAX_SHIFT: Final = 63


def mitchell_log2(x: Tensor) -> Tensor:
    """Return ``log2(x)`` of positive normal float32 numbers in units of 1/256, int32.

    It is read off their bits.
    """
    return (x.contiguous().view(torch.int32) - 0x3F800000) >> 15


class Magnitudes:
    """The running logarithms of one weight ``[N, K]``.

    Args:
        rows: ``N``.
        columns: ``K``.
        device: device of the state.

    Attributes:
        steps: updates seen.
        casts: micro-batches that cast votes for the last step.
        deferred: micro-batches of the step under way after which it was put off.
    """

    def __init__(self, rows: int, columns: int, device: torch.device | str = "cpu") -> None:
        self._rows = rows
        self._columns = columns
        # Rows, then columns: a step on both at once needs half the calls, which take most of the
        # time.
        self._logarithms = torch.zeros(rows + columns, dtype=torch.int16, device=device)
        self.steps = 0
        self.casts = 1
        self.deferred = 0

    @property
    def row(self) -> Tensor:
        """Logarithms of the rows, int16 ``[N]``; a view."""
        return self._logarithms[: self._rows]

    @property
    def column(self) -> Tensor:
        """Logarithms of the columns, int16 ``[K]``; a view."""
        return self._logarithms[self._rows :]

    @property
    def counts(self) -> tuple[int, int]:
        """Rows and columns."""
        return self._rows, self._columns

    @property
    def device(self) -> torch.device:
        """Device of the state."""
        return self._logarithms.device

    @property
    def spread(self) -> int:
        """Micro-batches that the votes of the step under way are spread over."""
        return max(self.casts, self.deferred + 1)

    def rescale(self, octaves: float) -> None:
        """Take all gradients so far as ``2**octaves`` times as large."""
        moved = self._logarithms.to(torch.int32) + round(FRACTION * octaves)
        self._logarithms.copy_(moved.clamp_(-(2**15), 2**15 - 1))

    @classmethod
    def update_all(
        cls,
        tracked: Sequence[Magnitudes],
        sums: Sequence[Tensor],
        weight: float,
        casts: Sequence[int],
    ) -> None:
        """Take in one step of several weights on one device at once.

        For small weights the number of calls determines the time.

        Args:
            tracked: the weights.
            sums: for each float32 ``[N + K]``: ``|g|`` summed over each row, then over each column,
                and over micro-batches.
            weight: weight of this step; the first steps weigh ``1 / step`` instead, if that is
                more.
            casts: micro-batches of the step, at least 1.
        """
        shares = []
        units = []
        for each, count in zip(tracked, casts, strict=True):
            each.steps += 1
            each.casts = count
            each.deferred = 0
            share = round(65536 * max(weight, 1.0 / each.steps))
            shares += [share, share]
            # The sum over a row has as many terms as there are columns, and the other way round.
            units.append(_log2(max(each._columns, 1) * count))
            units.append(_log2(max(each._rows, 1) * count))

        all_sums = torch.cat(list(sums)).nan_to_num(0.0, torch.finfo(torch.float32).max, 0.0)
        old = torch.cat([each._logarithms for each in tracked]).to(torch.int32)
        means = mitchell_log2(all_sums).sub_(_spread(tracked, units))
        change = means.sub_(old).mul_(_spread(tracked, shares))
        new = change.add_(1 << 15).bitwise_right_shift_(16).add_(old).clamp_(-(2**15), 2**15 - 1)
        kept = torch.where(all_sums >= torch.finfo(torch.float32).tiny, new, old)
        for each, part in zip(tracked, _parts(kept, tracked), strict=True):
            each._logarithms.copy_(part)

    @staticmethod
    def _relative(tracked: Sequence[Magnitudes]) -> Tensor:
        """Return the logarithms, those of rows less their mean: ``log2(r_n / m)``, ``log2(c_k)``.

        They are int32, one weight after another.
        """
        means = [each.row.sum() for each in tracked]
        rows = torch.tensor([max(each._rows, 1) for each in tracked], device=means[0].device)
        mean = torch.stack(means).div_(rows, rounding_mode="floor").to(torch.int32)
        both = torch.stack([mean, torch.zeros_like(mean)], dim=1).flatten()
        logarithms = torch.cat([each._logarithms for each in tracked]).to(torch.int32)
        return logarithms.sub_(_spread(tracked, both))

    @classmethod
    def all_factors(
        cls, tracked: Sequence[Magnitudes], quanta: Sequence[float]
    ) -> tuple[Tensor, ...]:
        """Return float32 factors ``[N + K]`` of rows and columns, of weights on one device.

        ``g * row * column`` is ``quanta`` times the gradient in standard deviations.
        """
        factors = _power(cls._relative(tracked).neg_())
        sizes = []
        for each in quanta:
            sizes += [each * _GAUSSIAN, 1.0]
        scales = _spread(tracked, torch.tensor(sizes, dtype=torch.float32))
        return _parts(factors.mul_(scales), tracked)

    @classmethod
    def all_shifts(
        cls, tracked: Sequence[Magnitudes], quanta: Sequence[float]
    ) -> tuple[Tensor, ...]:
        """Return :meth:`all_factors` as right shifts, int32 ``[N + K]``.

        Rows and columns are each rounded to the nearest power of two.
        """
        units = []
        for each in quanta:
            units += [_log2(each * _GAUSSIAN), 0]
        shifts = cls._relative(tracked).sub_(_spread(tracked, units))
        shifts = shifts.add_(FRACTION // 2).bitwise_right_shift_(8).clamp_(-_MAX_SHIFT, _MAX_SHIFT)
        return _parts(shifts, tracked)

    def state_dict(self) -> dict[str, Tensor | int]:
        """Return the logarithms, the number of steps and that of micro-batches."""
        counts = {"steps": self.steps, "casts": self.casts, "deferred": self.deferred}
        return {"row": self.row.clone(), "column": self.column.clone(), **counts}

    def load_state_dict(self, state: dict[str, Tensor | int]) -> None:
        """Restore what :meth:`state_dict` returned.

        Raises:
            ValueError: the shapes are those of another weight.
        """
        row = state["row"]
        column = state["column"]
        assert isinstance(row, Tensor)
        assert isinstance(column, Tensor)
        if row.shape != self.row.shape or column.shape != self.column.shape:
            raise ValueError(
                f"magnitudes of a {row.numel()} x {column.numel()} weight do not fit one of "
                f"{self.row.numel()} x {self.column.numel()}"
            )
        self.row.copy_(row)
        self.column.copy_(column)
        self.steps = int(state["steps"])
        self.casts = int(state["casts"])
        self.deferred = int(state["deferred"])


def _log2(x: float) -> int:
    """Return ``log2(x)`` in units."""
    return round(FRACTION * math.log2(x))


@cache
def _fractions(device: torch.device) -> Tensor:
    """Return ``2**(i / 256)`` for ``i`` in 0..255, float32."""
    return torch.tensor([2.0 ** (i / FRACTION) for i in range(FRACTION)], device=device)


def _power(x: Tensor) -> Tensor:
    """Return two to the power of ``x`` units (int32) as float32, with normal numbers at both ends.

    It is computed from a table and an exponent: ``exp2`` has other last bits in the middle of a
    tensor than at its end.
    """
    whole = (x >> 8).clamp_(-126, 127).add_(127).bitwise_left_shift_(23).view(torch.float32)
    return _fractions(x.device).index_select(0, x & (FRACTION - 1)).mul_(whole)


def _spread(tracked: Sequence[Magnitudes], values: Sequence[int] | Tensor) -> Tensor:
    """Repeat a value for the rows of each weight and one for its columns, as often as there are.

    Numbers become int32.
    """
    device = tracked[0].device
    dtype = None if isinstance(values, Tensor) else torch.int32
    given = torch.as_tensor(values, dtype=dtype, device=device)
    counts = [count for each in tracked for count in each.counts]
    repeats = torch.tensor(counts, device=device)
    return given.repeat_interleave(repeats, output_size=sum(counts))


def _parts(values: Tensor, tracked: Sequence[Magnitudes]) -> tuple[Tensor, ...]:
    """Split ``values`` into views, one per weight."""
    return torch.split(values, [sum(each.counts) for each in tracked])
