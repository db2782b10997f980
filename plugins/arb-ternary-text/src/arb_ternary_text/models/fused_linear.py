"""A ternary linear inside of a fused part: its product, its gradients and its votes, by direct
calls of the kernels.

The integers are those of ``arb_ternary.backends.ops.linear`` and its gradient: rows, hashes and
votes are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn

from arb_ternary.backends import ops
from arb_ternary.backends.vote_state import VoteState
from arb_ternary.counters.hashing import USE_GRAD_INPUT, USE_VOTES, hash_words
from arb_ternary.ternary.linear import TernaryLinear
from arb_ternary_text.models.fused import Kernels

#: Gradients from this size on are quantised in two calls.
_MANY: Final = 1 << 32


class FusedLinear(NamedTuple):
    """What forward and backward know of a linear.

    Attributes:
        module: the linear itself.
        kernels: of its backend.
        state: its weight and what it learns by.
        anchor: what makes backward reach it; None where it casts no votes.
        integer: whether its gradients are int8.
    """

    module: TernaryLinear
    kernels: Kernels
    state: VoteState
    anchor: Tensor | None
    integer: bool

    @classmethod
    def of(cls, linear: nn.Module, kernels: Kernels) -> FusedLinear:
        """That of a ternary linear; UsageProblem inside of torch's ``DistributedDataParallel``."""
        if not isinstance(linear, TernaryLinear):
            raise TypeError(f"a ternary linear is needed, got a {type(linear).__name__}")
        return cls(
            linear, kernels, linear.vote_state(), linear.vote_anchor(), linear.gradients == "int8"
        )

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
        casts = self.anchor is not None
        state = self.state
        grad_MN = grad_MN.contiguous()
        grad = grad_MN
        scale = None
        folded = None
        folded_scale = None
        if self.integer:
            grad, scale, folded, folded_scale = self._integers(
                grad_MN, scale_M, needs_input=needs_input
            )
        elif casts:
            # The token scales of int8 activations belong to the product; folded into the gradient,
            # x stays integer.
            folded = grad_MN * scale_M.to(grad_MN.dtype).unsqueeze(1)
        grad_x = None
        if needs_input:
            arguments = (grad, scale, state.weight, state.exponent, state.shape, grad_MN.dtype)
            grad_x = self.kernels["linear_grad_input"](*arguments)
        if casts:
            ops.cast_votes.function(folded, q_MK, folded_scale, state)
        return grad_x

    def _integers(
        self, grad_MN: Tensor, scale_M: Tensor, *, needs_input: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """The int8 gradient for the rows and the one for the votes, each with its power of two,
        where it is needed.
        """
        seed, step, stream = hash_words(self.state.control)
        casts = self.anchor is not None
        if needs_input and casts and grad_MN.numel() < _MANY:
            words = (seed, step, stream + USE_GRAD_INPUT, stream + USE_VOTES)
            grad, scale, folded, folded_scale = self.kernels["quantize_gradients"](
                grad_MN, scale_M, *words
            )
            return grad, scale, folded, folded_scale
        quantize = self.kernels["quantize_gradient"]
        grad, scale = (
            quantize(grad_MN, seed, step, stream + USE_GRAD_INPUT)
            if needs_input
            else (grad_MN, None)
        )
        if not casts:
            return grad, scale, None, None
        folded = grad_MN * scale_M.to(grad_MN.dtype).unsqueeze(1)
        return grad, scale, *quantize(folded, seed, step, stream + USE_VOTES)


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
