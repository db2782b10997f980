"""A matrix made ternary by one of the policies; of several ways, the one with the least error, row
by row.
"""

from __future__ import annotations

from typing import Final

import torch
from attrs import frozen
from torch import Tensor

from arb_ternary_upcycle.projection.config import ActivationOrder, Policy
from arb_ternary_upcycle.projection.correction import damped
from arb_ternary_upcycle.projection.descent import descend
from arb_ternary_upcycle.projection.gptq import compensate, inverse_factor, objective
from arb_ternary_upcycle.projection.rounded import EXPONENTS, Grouping, Rounded, columns_of
from arb_ternary_upcycle.projection.scales import absmean, least_squares, least_squares_exponents

# : Exponents tried, from those of the least squares weighted by the strength of inputs: making up
# for errors spreads : weights, so that a larger one may fit.
_OFFSETS: Final = (-1, 0, 1)
#: Numbers in one working matrix.
_AT_ONCE: Final = 1 << 23


@frozen(kw_only=True)
class Recipe:
    """How matrices are rounded.

    Attributes:
        policy: ``absmean`` and ``ls`` look at weights alone, ``gptq`` and ``gptq_cd`` at inputs
            too.
        grouping: what shares an exponent.
        damping: added to the diagonal of ``X^T X``, over the diagonal's mean.
        activation_order: whether columns are rounded from the strongest input to the weakest, or as
            they stand; auto = each row in the better of both.
        descent_passes: most rounds of coordinate descent, in ``gptq_cd``.
    """

    policy: Policy = "gptq_cd"
    grouping: Grouping = "row"
    damping: float = 0.01
    activation_order: ActivationOrder = "auto"
    descent_passes: int = 4

    @property
    def needs_inputs(self) -> bool:
        """Whether the policy looks at inputs."""
        return self.policy in ("gptq", "gptq_cd")


def project(weight: Tensor, recipe: Recipe, gram: Tensor | None = None) -> Rounded:
    """``weight [N, K]`` as trits and powers of two.

    Args:
        weight: float32 or float64.
        recipe: how.
        gram: ``X^T X [K, K]`` of the inputs, for policies that look at them.

    Raises:
        ValueError: such a policy without ``gram``.
    """
    if not recipe.needs_inputs:
        return (absmean if recipe.policy == "absmean" else least_squares)(weight, recipe.grouping)
    if gram is None:
        raise ValueError(f"{recipe.policy} needs the products of inputs")
    return _Search(weight, recipe, gram).result()


class _Search:
    """``gptq`` from several exponents and in two orders, then ``gptq_cd``'s descent from the best
    of them.
    """

    def __init__(self, weight: Tensor, recipe: Recipe, gram: Tensor) -> None:
        self.recipe = recipe
        self.weight = weight.to(torch.float32)
        hessian = damped(gram, recipe.damping)
        self.hessian = hessian.to(torch.float32)
        columns = weight.shape[1]
        self.size = columns_of(recipe.grouping, columns)
        self.start = least_squares_exponents(self.weight, recipe.grouping, hessian.diagonal())
        strongest = torch.argsort(hessian.diagonal(), descending=True, stable=True)
        as_they_stand = torch.arange(columns)
        orders = {
            "never": [as_they_stand],
            "always": [strongest],
            "auto": [as_they_stand, strongest],
        }
        self.orders = [
            (order, inverse_factor(hessian[order][:, order]).to(torch.float32))
            for order in orders[recipe.activation_order]
        ]

    def result(self) -> Rounded:
        """Rows some at a time."""
        rows, columns = self.weight.shape
        step = max(1, _AT_ONCE // (len(_OFFSETS) * max(columns, 1)))
        parts = [slice(start, start + step) for start in range(0, rows, step)]
        offsets = list(_OFFSETS)
        if self.recipe.grouping == "tensor":
            # One exponent for all rows: that with the least sum of errors.
            sums = [
                sum(float(self._gptq(part, [offset])[0].sum()) for part in parts)
                for offset in offsets
            ]
            offsets = [offsets[sums.index(min(sums))]]
        found = [self._rows(part, offsets) for part in parts]
        trits, exponent, residue = (torch.cat([each[i] for each in found]) for i in range(3))
        return Rounded(trits, exponent, residue, self.size)

    def _rows(self, part: slice, offsets: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        _, trits_KR, value_KR, exponent_JR = self._gptq(part, offsets)
        if self.recipe.policy == "gptq_cd":
            value_KR = descend(
                self.weight[part].mT.contiguous(),
                trits_KR,
                exponent_JR,
                self.hessian,
                self.size,
                self.recipe.descent_passes,
                move=self.recipe.grouping != "tensor",
            )
        residue_KR = value_KR.mul_(self._wide(torch.exp2(-exponent_JR))).sub_(trits_KR)
        return (
            trits_KR.mT.to(torch.int8).contiguous(),
            exponent_JR.mT.to(torch.int8).contiguous(),
            residue_KR.mT.contiguous(),
        )

    def _gptq(self, part: slice, offsets: list[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Errors ``[R]``, trits and values in their turn ``[K, R]``, exponents ``[J, R]``: of each
        row the best.
        """
        weight_KR = self.weight[part].mT.contiguous()
        rows = weight_KR.shape[1]
        first_JR = self.start[part].mT.to(torch.float32)
        exponent_JC = torch.cat([first_JR + offset for offset in offsets], dim=1).clamp_(*EXPONENTS)
        repeated_KC = weight_KR.repeat(1, len(offsets))
        scale_KC = self._wide(torch.exp2(exponent_JC))
        best: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
        for order, factor in self.orders:
            back = torch.argsort(order)
            ordered = scale_KC if scale_KC.shape[0] == 1 else scale_KC[order]
            trits_KC, value_KC = compensate(repeated_KC[order], factor, ordered)
            trits_KC = trits_KC[back]
            value_KC = value_KC[back]
            error_C = objective(trits_KC * scale_KC - repeated_KC, self.hessian)
            for number in range(len(offsets)):
                some = slice(number * rows, (number + 1) * rows)
                found = (error_C[some], trits_KC[:, some], value_KC[:, some], exponent_JC[:, some])
                if best is None:
                    best = tuple(each.clone() for each in found)  # type: ignore[assignment]
                else:
                    better = found[0] < best[0]
                    for kept, new in zip(best, found, strict=True):
                        torch.where(better, new, kept, out=kept)
        assert best is not None  # there is always an order and an offset
        return best

    def _wide(self, values_JR: Tensor) -> Tensor:
        if values_JR.shape[0] == 1:
            return values_JR
        return values_JR.repeat_interleave(self.size, dim=0)[: self.weight.shape[1]]
