"""Random operands of a cell."""

from __future__ import annotations

from functools import cached_property
from typing import Final

import torch
from torch import Tensor

from _kernels.cells import Cell

#: Exponents of random weights: as close together as training leaves them.
_EXPONENTS: Final = (-8, -6)


class Operands:
    """Random operands of a cell, each made when it is first used, from one generator.

    Args:
        cell: gives the sizes.
        seed: of the generator.
    """

    def __init__(self, cell: Cell, seed: int) -> None:
        self.cell = cell
        self._generator = torch.Generator(cell.device).manual_seed(seed)

    def integers(self, low: int, high: int, *size: int) -> Tensor:
        """Draw uniform integers in ``low..high``, int8."""
        return torch.randint(
            low,
            high + 1,
            size,
            dtype=torch.int8,
            generator=self._generator,
            device=self.cell.device,
        )

    def normal(self, *size: int) -> Tensor:
        """Draw Gaussian numbers, float32."""
        return torch.randn(*size, generator=self._generator, device=self.cell.device)

    @cached_property
    def trits(self) -> Tensor:
        """Trits, int8 ``[N, K]``."""
        return self.integers(-1, 1, self.cell.out_features, self.cell.in_features)

    @cached_property
    def exponent(self) -> Tensor:
        """Exponents of groups, int8 ``[N, J]``."""
        return self.integers(*_EXPONENTS, self.cell.out_features, self.cell.shape.groups)

    @cached_property
    def dense(self) -> Tensor:
        """The weight as numbers, float32 ``[N, K]``."""
        wide = self.exponent.to(torch.int32).repeat_interleave(self.cell.shape.group_size, dim=1)
        return torch.ldexp(self.trits.to(torch.float32), wide[:, : self.cell.in_features])

    @cached_property
    def x(self) -> Tensor:
        """Activations, float32 ``[M, K]``."""
        return self.normal(self.cell.rows, self.cell.in_features)

    @cached_property
    def q(self) -> Tensor:
        """Quantised activations, int8 ``[M, K]``, of every size up to 127."""
        return self.integers(-127, 127, self.cell.rows, self.cell.in_features)

    @cached_property
    def scale(self) -> Tensor:
        """Scales of the rows of ``q``, float32 ``[M]``."""
        return self.normal(self.cell.rows).abs() * 0.02 + 0.005

    @cached_property
    def gradient(self) -> Tensor:
        """Gradient of the output, float32 ``[M, N]``."""
        return self.normal(self.cell.rows, self.cell.out_features)

    @cached_property
    def int8_gradient(self) -> Tensor:
        """Quantised gradient of the output, int8 ``[M, N]``."""
        return self.integers(-127, 127, self.cell.rows, self.cell.out_features)

    @cached_property
    def gradient_scale(self) -> Tensor:
        """Scale of the quantised gradient, a power of two, float32 scalar."""
        return torch.tensor(2.0**-9, device=self.cell.device)
