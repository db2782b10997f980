"""Ternary linears whose rows have factors that learn.

A power of two says how loud a row is to within a factor of ``sqrt(2)``, and a change of it is an
octave at once: a decoder whose rows are an octave off at random is a worse one. The factors are the
mantissas beside those exponents. They are numbers that float16 holds, so that formats whose blocks
of trits have a scale in it hold them.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from arb_ternary.ternary.linear import TernaryLinear
from arb_ternary_text.models.trit_vector import TritVector


class RowScaled(TernaryLinear):
    """``y = s * (x @ W.T)`` with a factor for each row, ``s[N]``, 1 at birth.

    Votes are of the gradient of ``T 2**E``, which has the factor of the row.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x [..., K]`` (float) to ``[..., N]`` in the dtype of ``x``, or of autocast."""
        y = super().forward(x)
        return y * self.learning_factors().to(y.dtype)

    @abstractmethod
    def learning_factors(self) -> Tensor:
        """``s [N]``, whose gradient goes to what learns."""

    @abstractmethod
    def factors(self) -> Tensor:
        """What rows are multiplied by: float32 ``[N]``, numbers that float16 holds."""

    def dense_weight(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """``s T * 2**E`` as a float matrix ``[N, K]``, rounded to ``dtype``."""
        return (super().dense_weight() * self.factors().unsqueeze(1)).to(dtype)


class RowScaledTernaryLinear(RowScaled):
    """With float factors: the parameter ``row_scale``, rounded to float16 where it multiplies.

    The gradient passes straight through the rounding. Whoever trains the float parts trains it,
    with gradients of its own. The audit counts it as a float parameter: a model with such linears
    is not pure.
    """

    row_scale: nn.Parameter

    def __init__(self, in_features: int, out_features: int, **options: Any) -> None:
        super().__init__(in_features, out_features, **options)
        self.row_scale = nn.Parameter(torch.ones(out_features, device=self.exponent.device))

    def learning_factors(self) -> Tensor:
        """The factors in the dtype of the parameter."""
        return self.row_scale + (self.factors().to(self.row_scale.dtype) - self.row_scale).detach()

    @torch.no_grad()
    def factors(self) -> Tensor:
        """See :class:`RowScaled`."""
        return self.row_scale.half().float()


class TritScaledTernaryLinear(RowScaled):
    """With factors that are 1 plus means of trits, ``row_trits``, and learn by votes: it has no
    float parameter.
    """

    def __init__(
        self, in_features: int, out_features: int, *, vector_trits: int, **options: Any
    ) -> None:
        super().__init__(in_features, out_features, **options)
        self.row_trits = TritVector(
            out_features, vector_trits, gradients=self.gradients, backend=self.chosen_backend
        )

    def learning_factors(self) -> Tensor:
        """The factors in float32."""
        factors: Tensor = self.row_trits()
        return factors

    def factors(self) -> Tensor:
        """See :class:`RowScaled`."""
        return self.row_trits.values()
