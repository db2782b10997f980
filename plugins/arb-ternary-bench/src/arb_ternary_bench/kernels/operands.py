"""Random operands of a cell, and the exact results that kernels are checked against.

Exact products are computed in float64, where a sum of integers below 2**53 is exact in any order.
They restate the number format and share no code with a backend.
"""

from __future__ import annotations

from functools import cached_property
from typing import Final

import torch
from torch import Tensor

from arb_ternary.backends.protocol import WeightShape
from arb_ternary_bench.kernels.cells import Cell

#: Exponents of random weights: as close together as training leaves them.
_EXPONENTS: Final = (-8, -6)
#: Rows of the weight that are held in float64 at a time.
_STRETCH: Final = 1024


class Operands:
    """Random operands of a cell, each made when it is first used, from one generator.

    Args:
        cell: gives the sizes.
        seed: of the generator.
    """

    def __init__(self, cell: Cell, seed: int) -> None:
        self.cell = cell
        self._generator = torch.Generator(cell.device).manual_seed(seed)

    def integers(self, low: int, high: int, *size: int, dtype: torch.dtype = torch.int8) -> Tensor:
        """Draw uniform integers in ``low..high``."""
        return torch.randint(
            low, high + 1, size, dtype=dtype, generator=self._generator, device=self.cell.device
        )

    def normal(self, *size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Draw Gaussian numbers."""
        return torch.randn(*size, generator=self._generator, device=self.cell.device).to(dtype)

    def uniform(self, *size: int) -> Tensor:
        """Draw uniform numbers from 0 up to 1."""
        return torch.rand(*size, generator=self._generator, device=self.cell.device)

    @cached_property
    def trits(self) -> Tensor:
        """Trits, int8 ``[N, K]``."""
        return self.integers(-1, 1, self.cell.out_features, self.cell.in_features)

    @cached_property
    def exponent(self) -> Tensor:
        """Exponents of groups, int8 ``[N, J]``."""
        return self.integers(*_EXPONENTS, self.cell.out_features, self.cell.shape.groups)

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
        return self.uniform(self.cell.rows) * 0.02 + 0.005

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


def _in_units(trits_nK: Tensor, shift_nJ: Tensor, shape: WeightShape) -> Tensor:
    shift = shift_nJ.repeat_interleave(shape.group_size, dim=1)[:, : shape.in_features]
    return torch.ldexp(trits_nK.to(torch.float64), shift)


def _power(exponent: Tensor) -> Tensor:
    return torch.ldexp(torch.ones(exponent.shape, device=exponent.device), exponent.to(torch.int32))


def exact_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the right result of ``quantize_rows``: int8 and the scale of each row.

    The division is by a tensor: on a GPU, division by a number is a product with its rounded
    reciprocal.
    """
    largest = x.abs().amax(dim=1)
    scale = largest / torch.full_like(largest, 127.0)
    return (x / scale.unsqueeze(1)).round().to(torch.int8), scale


def exact_linear(
    q_MK: Tensor, scale_M: Tensor, trits_NK: Tensor, exponent_NJ: Tensor, shape: WeightShape
) -> Tensor:
    """Return ``float32(sum of integers) * scale * 2**Emin``, ``[M, N]``, as the format defines."""
    wide = exponent_NJ.to(torch.int32)
    floor_N = wide.amin(dim=1)
    shift_NJ = wide - floor_N.unsqueeze(1)
    out = torch.empty(q_MK.shape[0], shape.out_features, device=q_MK.device)
    left = q_MK.to(torch.float64)
    for start in range(0, shape.out_features, _STRETCH):
        some = slice(start, start + _STRETCH)
        out[:, some] = (left @ _in_units(trits_NK[some], shift_NJ[some], shape).t()).to(
            torch.float32
        )
    return out.mul_(scale_M.unsqueeze(1)).mul_(_power(floor_N))


def exact_grad_input(
    grad_MN: Tensor, scale: Tensor, trits_NK: Tensor, exponent_NJ: Tensor, shape: WeightShape
) -> Tensor:
    """Return ``float32(sum of integers) * scale * 2**Emin``, ``[M, K]``.

    ``Emin`` is the smallest exponent of each column group.
    """
    wide = exponent_NJ.to(torch.int32)
    floor_J = wide.amin(dim=0, keepdim=True)
    total = torch.zeros(
        grad_MN.shape[0], shape.in_features, dtype=torch.float64, device=grad_MN.device
    )
    for start in range(0, shape.out_features, _STRETCH):
        some = slice(start, start + _STRETCH)
        total += grad_MN[:, some].to(torch.float64) @ _in_units(
            trits_NK[some], (wide - floor_J)[some], shape
        )
    floor_K = floor_J.repeat_interleave(shape.group_size, dim=1)[:, : shape.in_features]
    return total.to(torch.float32).mul_(scale).mul_(_power(floor_K))
