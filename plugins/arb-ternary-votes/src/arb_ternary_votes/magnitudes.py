"""Running magnitudes of a gradient by row and by column, as fixed-point logarithms, and the scales that votes get.

The normaliser of element ``g[n, k]`` is ``r_n * c_k / m``, with ``r_n`` the mean of ``|g|`` over row ``n``, ``c_k``
that over column ``k`` and ``m`` the mean of all: the factored estimate of Adafactor (Shazeer and Stern, 2018), of first
absolute instead of second moments. A sum of absolute integers is an exact integer of at most 44 bits, which a sum of
squares is not; on the same gradients both train equally well.

State is int16, in units of 1/256 of a factor of two. The logarithm of a float32 is read off its bits (Mitchell, 1962):
``log2(2**e * (1 + f)) ~ e + f``, at most 0.086 too small. With ``l`` the logarithm of this step's mean and ``b`` the
weight of a step in units of 2**-16::

    L = L + ((l - L) * b + 2**15 >> 16)

Rows or columns without a gradient keep their value. Everything is integer arithmetic, the same on every machine.

A step can have several micro-batches, and whoever puts steps off does not say beforehand how many. Means are those of
one micro-batch, and votes are spread: with ``n`` the micro-batches of the last step, the ``i``-th of the next one has
votes of ``1 / max(n, i)`` of a step's size. As many as last time make one step's votes; 64 instead of 1 make 4.7 times
as many, not 64 times.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

__all__ = ["FRACTION", "Magnitudes", "mitchell_log2"]

#: Units a factor of two.
FRACTION: Final = 256
#: ``E|x| / sqrt(E x**2)`` of a Gaussian: what turns a mean of absolute values into a standard deviation.
_GAUSSIAN: Final = math.sqrt(2.0 / math.pi)
#: Largest right shift of an integer gradient.
_MAX_SHIFT: Final = 63


def mitchell_log2(x: Tensor) -> Tensor:
    """``log2(x)`` of positive normal float32 numbers in units of 1/256, int32, read off their bits."""
    return (x.contiguous().view(torch.int32) - 0x3F800000) >> 15


class Magnitudes:
    """The running logarithms of one weight ``[N, K]``.

    Args:
        rows: ``N``.
        columns: ``K``.
        device: of the state.

    Attributes:
        steps: updates seen.
        casts: micro-batches that cast votes for the last step.
        deferred: of the step under way, those after which it was put off.
    """

    def __init__(self, rows: int, columns: int, device: torch.device | str = "cpu") -> None:
        self._rows = rows
        self._columns = columns
        # Rows, then columns: a step on both at once takes half the calls, which are most of its time.
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
    def spread(self) -> int:
        """Micro-batches that the votes of the step under way are spread over."""
        return max(self.casts, self.deferred + 1)

    def update(self, sums: Tensor, weight: float, casts: int = 1) -> None:
        """Take in one step.

        Args:
            sums: float32 ``[N + K]``: ``|g|`` summed over each row, then over each column, and over micro-batches.
            weight: of this step; the first steps weigh ``1 / step`` instead, where that is more.
            casts: micro-batches of the step, at least 1.
        """
        sums = sums.nan_to_num(0.0, torch.finfo(torch.float32).max, 0.0)
        self.steps += 1
        self.casts, self.deferred = casts, 0
        share = round(65536 * max(weight, 1.0 / self.steps))
        old = self._logarithms.to(torch.int32)
        change = mitchell_log2(sums)
        for part, count in ((change[: self._rows], self._columns), (change[self._rows :], self._rows)):
            part.sub_(round(FRACTION * math.log2(max(count, 1) * casts)))
        change.sub_(old).mul_(share).add_(1 << 15).bitwise_right_shift_(16)
        new = change.add_(old).clamp_(-(2**15), 2**15 - 1)
        self._logarithms.copy_(torch.where(sums >= torch.finfo(torch.float32).tiny, new, old))

    def _relative(self) -> Tensor:
        """The logarithms, those of rows less their mean: ``log2(r_n / m)``, ``log2(c_k)``; int32 ``[N + K]``."""
        mean = self.row.sum().div_(max(self._rows, 1), rounding_mode="floor")
        relative = self._logarithms.to(torch.int32)
        relative[: self._rows].sub_(mean)
        return relative

    def factors(self, quanta: float) -> Tensor:
        """Float32 ``[N + K]``: ``g * row * column`` is ``quanta`` times the gradient in standard deviations."""
        factors = self._relative().to(torch.float32).div_(-FRACTION).exp2_()
        factors[: self._rows].mul_(quanta * _GAUSSIAN)
        return factors

    def shifts(self, quanta: float) -> Tensor:
        """Int32 ``[N + K]``: the same as right shifts, rows and columns each rounded to the nearest power of two."""
        shifts = self._relative()
        shifts[: self._rows].sub_(round(FRACTION * math.log2(quanta * _GAUSSIAN)))
        return shifts.add_(FRACTION // 2).bitwise_right_shift_(8).clamp_(-_MAX_SHIFT, _MAX_SHIFT)

    def state_dict(self) -> dict[str, Tensor | int]:
        """The logarithms, the number of steps, and of micro-batches."""
        counts = {"steps": self.steps, "casts": self.casts, "deferred": self.deferred}
        return {"row": self.row.clone(), "column": self.column.clone(), **counts}

    def load_state_dict(self, state: dict[str, Tensor | int]) -> None:
        """Restore what :meth:`state_dict` gave.

        Raises:
            ValueError: the shapes are of another weight.
        """
        row, column = state["row"], state["column"]
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
        self.casts, self.deferred = int(state["casts"]), int(state["deferred"])
