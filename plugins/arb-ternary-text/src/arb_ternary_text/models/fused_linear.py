"""A ternary linear inside of a fused part: its product, its gradients and its votes, by direct
calls of the kernels.

The integers are those of ``arb_ternary.backends.ops.linear`` and its gradient: rows, hashes and
votes are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from arb_ternary.backends import ops
from arb_ternary.backends.vote_state import VoteState
from arb_ternary.ternary.linear import TernaryLinear
from arb_ternary_text.models.fused import Kernels


class FusedLinear(NamedTuple):
    """What forward and backward know of a linear.

    Attributes:
        module: the linear itself.
        kernels: of its backend.
        state: its weight and what it learns by.
        anchor: what makes backward reach it; None where it casts no votes.
    """

    module: TernaryLinear
    kernels: Kernels
    state: VoteState
    anchor: Tensor | None

    @classmethod
    def of(cls, linear: nn.Module, kernels: Kernels) -> FusedLinear:
        """That of a ternary linear; UsageProblem inside of torch's ``DistributedDataParallel``."""
        if not isinstance(linear, TernaryLinear):
            raise TypeError(f"a ternary linear is needed, got a {type(linear).__name__}")
        return cls(linear, kernels, linear.vote_state(), linear.vote_anchor())

    @property
    def saved(self) -> tuple[Tensor, Tensor]:
        """What must not change between forward and backward."""
        return self.state.weight, self.state.exponent

    def expect_votes(self, y: Tensor) -> None:
        """Prepare for the votes that backward from ``y`` will cast, if it casts any."""
        if self.anchor is not None:
            self.module.expect_votes(y)

    def multiply(self, q_MK: Tensor, scale_M: Tensor, dtype: torch.dtype) -> Tensor:
        """``x @ W.T`` of quantised rows, ``[M, N]``."""
        state = self.state
        y: Tensor = self.kernels["linear"](
            q_MK, scale_M, state.weight, state.exponent, None, state.shape, dtype
        )
        return y

    def backward(
        self, grad_MN: Tensor, q_MK: Tensor, scale_M: Tensor, *, needs_input: bool
    ) -> Tensor | None:
        """Cast the votes; the gradient of the rows, ``[M, K]`` in the dtype of ``grad``, if it is
        needed.
        """
        return ops.linear_backward(
            grad_MN,
            q_MK,
            scale_M,
            self.state,
            gradients=self.module.gradients,
            dtype=grad_MN.dtype,
            needs_input=needs_input,
            casts=self.anchor is not None,
        )


def scaled(product_MN: Tensor, factor_N: Tensor | None) -> Tensor:
    """A product with its rows' factors, if there are any, in its dtype."""
    return product_MN if factor_N is None else product_MN * factor_N.to(product_MN.dtype)


def factor_grad(
    kernels: Kernels, grad_MN: Tensor, product_MN: Tensor | None, factor_N: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """From the gradient of a scaled product, those of the product and of the factors."""
    if factor_N is None or product_MN is None:
        return grad_MN, None
    of_factors = torch.zeros_like(factor_N)
    return kernels["scale_columns_backward"](grad_MN, product_MN, factor_N, of_factors), of_factors


def grad_buffer_like(gain: Tensor | None) -> Tensor | None:
    """What backward adds the gradient of a gain to."""
    return None if gain is None else torch.zeros_like(gain)


def join(modules: Sequence[nn.Module], kernels: Kernels) -> tuple[list[FusedLinear], Tensor | None]:
    """The linears, and the anchor of one that casts votes, if there is one."""
    linears = [FusedLinear.of(module, kernels) for module in modules]
    return linears, next((linear.anchor for linear in linears if linear.anchor is not None), None)


def weights_of(linears: Sequence[FusedLinear]) -> tuple[Tensor, ...]:
    """What must not change of the linears between forward and backward."""
    return tuple(tensor for linear in linears for tensor in linear.saved)
