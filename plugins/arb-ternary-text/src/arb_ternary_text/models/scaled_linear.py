"""A ternary linear with a float factor: for published weights whose scales are no powers of two."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from arb_ternary.ternary.linear import TernaryLinear


class ScaledTernaryLinear(TernaryLinear):
    """``y = c (x @ W.T)`` with one factor ``c``: the buffer ``scale``, float32 ``[1]``, 1 at birth.

    It stays as it is when weights learn, and float32 whatever the model is cast to. The audit
    counts it as a float buffer: a model with such linears is not pure.
    """

    scale: Tensor

    def __init__(self, in_features: int, out_features: int, **options: Any) -> None:
        super().__init__(in_features, out_features, **options)
        self.register_buffer("scale", torch.ones(1, device=self.exponent.device))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x [..., K]`` (float) to ``[..., N]`` in the dtype of ``x``."""
        y = super().forward(x)
        return y * self.scale.to(y.dtype)

    def dense_weight(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """``c T * 2**E`` as a float matrix ``[N, K]``, rounded to ``dtype``."""
        return (super().dense_weight() * self.scale).to(dtype)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        scale = self.scale
        super()._apply(fn, recurse)
        self.scale = scale.to(self.scale.device)
        return self
