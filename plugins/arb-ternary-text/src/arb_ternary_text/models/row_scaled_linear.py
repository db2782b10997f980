"""A ternary linear whose rows have float factors that learn.

A power of two says how loud a row is to within a factor of ``sqrt(2)``, and a change of it is an octave at once: a
decoder whose rows are an octave off at random is a worse one. The factors are the mantissas beside those exponents.
They are rounded to float16 where they multiply, so that formats whose blocks of trits have a scale in it hold them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from arb_ternary.ternary.linear import TernaryLinear

__all__ = ["RowScaledTernaryLinear"]


class RowScaledTernaryLinear(TernaryLinear):
    """``y = f16(s) * (x @ W.T)`` with a factor for each row: the parameter ``row_scale``, ``s[N]``, 1 at birth.

    The gradient passes straight through the rounding. Whoever trains the float parts trains it, with gradients of its
    own. Votes are of the gradient of ``T 2**E``, which has the factor of the row. The audit counts it as a float
    parameter: a model with such linears is not pure.
    """

    row_scale: nn.Parameter

    def __init__(self, in_features: int, out_features: int, **options: Any) -> None:
        super().__init__(in_features, out_features, **options)
        self.row_scale = nn.Parameter(torch.ones(out_features, device=self.exponent.device))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x [..., K]`` (float) to ``[..., N]`` in the dtype of ``x``, or of autocast."""
        y = super().forward(x)
        rounded = self.row_scale + (self.factors().to(self.row_scale.dtype) - self.row_scale).detach()
        return y * rounded.to(y.dtype)

    @torch.no_grad()
    def factors(self) -> Tensor:
        """What rows are multiplied by: float32 ``[N]``, numbers that float16 holds."""
        return self.row_scale.half().float()

    def dense_weight(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """``f16(s) T * 2**E`` as a float matrix ``[N, K]``, rounded to ``dtype``."""
        return (super().dense_weight() * self.factors().unsqueeze(1)).to(dtype)
