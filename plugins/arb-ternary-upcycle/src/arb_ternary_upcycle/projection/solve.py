"""Rounds one matrix by the chosen policy."""

from __future__ import annotations

import functools
from typing import Final

import torch
from attrs import frozen
from torch import Tensor

from arb_ternary_upcycle.projection.config import ProjectionConfig
from arb_ternary_upcycle.projection.correction import damped
from arb_ternary_upcycle.projection.descent import descend
from arb_ternary_upcycle.projection.gptq import compensate, inverse_factor, objective
from arb_ternary_upcycle.projection.rounded import (
    EXPONENTS,
    Grouping,
    Rounded,
    columns_of,
    joined,
    spread_transposed,
)
from arb_ternary_upcycle.projection.scales import absmean, least_squares, least_squares_exponents

#: Exponents that are tried, relative to those of the weighted least squares. Compensating errors
#: spreads the weights, so that a larger exponent may fit better.
_OFFSETS: Final = (-1, 0, 1)
#: Numbers in one working matrix.
_AT_ONCE: Final = 1 << 23


def project(
    weight: Tensor, config: ProjectionConfig, grouping: Grouping, gram: Tensor | None = None
) -> Rounded:
    """Round ``weight [N, K]`` to trits and powers of two.

    Args:
        weight: float32 or float64.
        config: policy and options.
        grouping: what shares an exponent.
        gram: ``X^T X [K, K]`` of the inputs, for the policies ``gptq`` and ``gptq_cd``.

    Raises:
        ValueError: such a policy without ``gram``.
    """
    if config.policy == "absmean":
        return absmean(weight, grouping)
    if config.policy == "ls":
        return least_squares(weight, grouping)
    if gram is None:
        raise ValueError(f"{config.policy} needs the products of inputs")
    return _Search(weight, config, grouping, gram).result()


@frozen(eq=False)
class _Candidates:
    """Roundings of ``C`` rows, side by side; all float32 but the errors.

    Attributes:
        error: the objective of each row, ``[C]``.
        trits: ``[K, C]``.
        value: the weights just before they were rounded, which leave the residue, ``[K, C]``.
        exponent: ``[J, C]``.
    """

    error: Tensor
    trits: Tensor
    value: Tensor
    exponent: Tensor

    def part(self, rows: slice) -> _Candidates:
        return _Candidates(
            self.error[rows], self.trits[:, rows], self.value[:, rows], self.exponent[:, rows]
        )

    def better_of(self, other: _Candidates) -> _Candidates:
        """Return the rounding with less error, row by row; of equal ones that of ``self``."""
        better = other.error < self.error
        return _Candidates(
            torch.where(better, other.error, self.error),
            torch.where(better, other.trits, self.trits),
            torch.where(better, other.value, self.value),
            torch.where(better, other.exponent, self.exponent),
        )


class _Search:
    """GPTQ with several exponents and in up to two orders; ``gptq_cd`` descends from the best."""

    def __init__(
        self, weight: Tensor, config: ProjectionConfig, grouping: Grouping, gram: Tensor
    ) -> None:
        columns = weight.shape[1]
        hessian = damped(gram, config.damping)
        diagonal = hessian.diagonal()
        self.config = config
        self.weight = weight.to(torch.float32)
        self.hessian = hessian.to(torch.float32)
        self.one_exponent = grouping == "tensor"
        self.size = columns_of(grouping, columns)
        self.start = least_squares_exponents(self.weight, grouping, diagonal)

        orders = []
        if config.activation_order != "always":
            orders.append(torch.arange(columns))
        if config.activation_order != "never":
            orders.append(torch.argsort(diagonal, descending=True, stable=True))
        self.orders = [
            (order, inverse_factor(hessian[order][:, order]).to(torch.float32)) for order in orders
        ]

    def result(self) -> Rounded:
        """Round the matrix, some rows at a time."""
        rows, columns = self.weight.shape
        step = max(1, _AT_ONCE // (len(_OFFSETS) * max(columns, 1)))
        parts = [slice(start, start + step) for start in range(0, rows, step)]
        offsets = list(_OFFSETS)
        if self.one_exponent:
            totals = {}
            for offset in _OFFSETS:
                totals[offset] = sum(
                    float(self._gptq(part, [offset]).error.sum()) for part in parts
                )
            offsets = [min(totals, key=lambda offset: totals[offset])]
        return joined([self._round(part, offsets) for part in parts])

    def _round(self, part: slice, offsets: list[int]) -> Rounded:
        found = self._gptq(part, offsets)
        trits_KR = found.trits
        exponent_JR = found.exponent
        value_KR = found.value
        if self.config.policy == "gptq_cd":
            value_KR = descend(
                self.weight[part].mT.contiguous(),
                trits_KR,
                exponent_JR,
                self.hessian,
                self.size,
                self.config.descent_passes,
                move=not self.one_exponent,
            )
        inverse_KR = spread_transposed(torch.exp2(-exponent_JR), self.size, len(value_KR))
        residue_KR = value_KR.mul_(inverse_KR).sub_(trits_KR)
        return Rounded(
            trits_KR.mT.to(torch.int8).contiguous(),
            exponent_JR.mT.to(torch.int8).contiguous(),
            residue_KR.mT.contiguous(),
            self.size,
        )

    def _gptq(self, part: slice, offsets: list[int]) -> _Candidates:
        """Return the best rounding of each row over exponents and orders."""
        weight_KR = self.weight[part].mT.contiguous()
        rows = weight_KR.shape[1]
        first_JR = self.start[part].mT.to(torch.float32)
        exponent_JC = torch.cat([first_JR + offset for offset in offsets], dim=1).clamp_(*EXPONENTS)
        repeated_KC = weight_KR.repeat(1, len(offsets))
        scale_KC = spread_transposed(torch.exp2(exponent_JC), self.size, self.weight.shape[1])

        candidates: list[_Candidates] = []
        for order, factor in self.orders:
            back = torch.argsort(order)
            ordered = scale_KC if scale_KC.shape[0] == 1 else scale_KC[order]
            trits_KC, value_KC = compensate(repeated_KC[order], factor, ordered)
            trits_KC = trits_KC[back]
            value_KC = value_KC[back]
            error_C = objective(trits_KC * scale_KC - repeated_KC, self.hessian)
            tried = _Candidates(error_C, trits_KC, value_KC, exponent_JC)
            starts = range(0, len(offsets) * rows, rows)
            candidates += [tried.part(slice(start, start + rows)) for start in starts]
        return functools.reduce(_Candidates.better_of, candidates)
