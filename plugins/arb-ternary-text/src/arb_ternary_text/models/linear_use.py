"""A ternary linear in one pass, for nodes of the graph that multiply by several linears.

Shapes: ``M`` rows of ``K`` features, products of ``N``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from arb_ternary.backends.ops import QuantizedPair, linear_backward
from arb_ternary.backends.vote_state import VoteState
from arb_ternary.ternary.linear import TernaryLinear
from arb_ternary_text.models.block_kernels import Kernels


class LinearUse(NamedTuple):
    """A ternary linear as forward and backward of a node need it.

    Attributes:
        module: the linear itself.
        state: its weight and what it learns by.
        anchor: makes backward reach it; None if it casts no votes.
    """

    module: TernaryLinear
    state: VoteState
    anchor: Tensor | None

    @classmethod
    def of(cls, module: nn.Module) -> LinearUse:
        """Return the use of ``module`` that begins now."""
        if not isinstance(module, TernaryLinear):
            raise TypeError(f"a ternary linear is needed, got a {type(module).__name__}")
        return cls(module, module.vote_state(), module.vote_anchor())

    def multiply(
        self, kernels: Kernels, q_MK: Tensor, scale_M: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """Return ``x @ W.T`` of quantised rows, ``[M, N]``."""
        state = self.state
        y: Tensor = kernels["linear"](
            q_MK, scale_M, state.weight, state.exponent, None, state.shape, dtype
        )
        return y

    def backward(
        self,
        grad_MN: Tensor,
        q_MK: Tensor,
        scale_M: Tensor,
        *,
        needs_input: bool,
        both: QuantizedPair | None = None,
    ) -> Tensor | None:
        """Cast the votes; return the gradient of the rows ``[M, K]`` if it is needed.

        ``both``: see :func:`~arb_ternary.backends.ops.linear_backward`.
        """
        return linear_backward(
            grad_MN,
            q_MK,
            scale_M,
            self.state,
            gradients=self.module.gradients,
            dtype=grad_MN.dtype,
            needs_input=needs_input,
            casts=self.anchor is not None,
            both=both,
        )

    def expect_votes(self, y: Tensor) -> None:
        """Prepare for the votes that backward from ``y`` will cast, if any."""
        if self.anchor is not None:
            self.module.expect_votes(y)


def first_anchor(uses: Iterable[LinearUse]) -> Tensor | None:
    """Return what makes backward reach the linears; None if none casts votes."""
    return next((use.anchor for use in uses if use.anchor is not None), None)


def weights_of(uses: Sequence[LinearUse]) -> Iterator[Tensor]:
    """Yield what a node keeps so that torch notices if weights change before backward."""
    for use in uses:
        yield use.state.weight
        yield use.state.exponent
