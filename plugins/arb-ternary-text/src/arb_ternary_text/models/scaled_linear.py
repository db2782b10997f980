"""Ternary linears whose products are multiplied by factors in addition to the powers of two.

A power of two gives the size of a row to within a factor of ``sqrt(2)``, and changing it moves the
row by an octave. Factors of rows are the mantissas that belong to these exponents. They are numbers
that float16 can represent, so that formats with a float16 scale per block of trits can hold them.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from arb_ternary.ternary.linear import TernaryLinear
from arb_ternary_text.models.trit_vector import TritVector


class ScaledTernaryLinear(TernaryLinear):
    """``y = s * (x @ W.T)`` with one constant factor, or with a learned factor per row.

    All factors are 1 at initialisation. Votes are cast from the gradient of ``T * 2**E``, which
    contains the factor.

    Args:
        in_features: ``K``.
        out_features: ``N``.
        factors: ``constant``: one factor that does not learn, for published weights. It is the
            float32 buffer ``scale`` ``[1]``, whatever the dtype of the model. ``rows``: a learned
            factor per row.
        trits: with ``rows``, the number of trits that each factor is 1 plus the mean of
            (``row_trits``); None makes them floats (``row_scale``), which are trained as other
            float parameters are.
        options: as for :class:`~arb_ternary.ternary.linear.TernaryLinear`.
    """

    scale: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        factors: Literal["constant", "rows"],
        trits: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(in_features, out_features, **options)
        device = self.exponent.device
        self.row_scale: nn.Parameter | None = None
        self.row_trits: TritVector | None = None
        if factors == "constant":
            self.register_buffer("scale", torch.ones(1, device=device))
            return
        self.scale = None
        if trits is None:
            self.row_scale = nn.Parameter(torch.ones(out_features, device=device))
        else:
            self.row_trits = TritVector(
                out_features, trits, gradients=self.gradients, backend=self.chosen_backend
            )

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x [..., K]`` (float) to ``[..., N]`` in the dtype of ``x``, or of autocast."""
        y = super().forward(x)
        return y * self.learning_factors().to(y.dtype)

    def learning_factors(self) -> Tensor:
        """Return the factors with a gradient to what learns: ``[N]``, or ``[1]`` if constant.

        The gradient of float factors passes straight through their rounding to float16.
        """
        if self.row_trits is not None:
            factors: Tensor = self.row_trits()
            return factors
        if self.row_scale is not None:
            rounded = self.factors().to(self.row_scale.dtype)
            return self.row_scale + (rounded - self.row_scale).detach()
        assert self.scale is not None
        return self.scale

    @torch.no_grad()
    def factors(self) -> Tensor:
        """Return the factors as they multiply: float32 ``[N]``, or ``[1]`` if constant."""
        if self.row_trits is not None:
            return self.row_trits.values()
        if self.row_scale is not None:
            return self.row_scale.half().float()
        assert self.scale is not None
        return self.scale

    def dense_weight(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """``s T * 2**E`` as a float matrix ``[N, K]``, rounded to ``dtype``."""
        return (super().dense_weight() * self.factors().unsqueeze(1)).to(dtype)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        constant = self.scale
        super()._apply(fn, recurse)
        if constant is not None and self.scale is not None:
            # It follows the module to another device, but stays float32.
            self.scale = constant.to(self.scale.device)
        return self
