"""The decoder with linears that are stored as integers only, for optimizers that train these.

``W = scale * C`` with codes ``C`` in {-1, 0, 1} (two bits per weight, packed) or in [-127, 127]
(int8), and one float32 scale per matrix that never changes. Initially ``C`` is the rounded weight
of the float decoder of the same seed, with

* ``ternary``: ``scale = mean |w|``, as in BitNet and in Zhao et al., "Direct Quantized Training of
  Language Models with Stochastic Rounding", 2024 (arXiv:2412.04787);
* ``int8``: ``scale = 2 max |w| / 127``, so that a weight may grow to twice the largest. (In the
  authors' code the grid ends at the mean magnitude, and larger weights are clipped.)

The gradient with respect to the dense weight is an attribute of the module from backward until
``zero_grad``.
"""

from __future__ import annotations

import math
from typing import Any, Final

import torch
from torch import Tensor, nn

from arb_ternary.backends.layout import pack_trits, unpack_trits
from arb_ternary.counters.hashing import new_control
from arb_ternary_qat.config import DirectConfig, Levels
from arb_ternary_qat.linears import replace_linears
from arb_ternary_qat.products import (
    compute_dtype,
    input_gradient,
    product,
    rounded_input,
    weight_gradient,
)
from arb_ternary_text.models.decoder import Decoder
from arb_ternary_text.models.parts import FloatLinear

#: Largest code by levels.
LIMITS: Final[dict[Levels, int]] = {"ternary": 1, "int8": 127}


class _DirectProduct(torch.autograd.Function):
    """Product with the codes; the gradient of the weight goes to ``module``, not to a parameter."""

    @staticmethod
    def forward(
        ctx: Any, x_MK: Tensor, anchor: Tensor | None, module: DirectLinear, dtype: torch.dtype
    ) -> Tensor:
        codes_NK = module.codes().to(dtype)
        q_MK, scale_M1 = rounded_input(x_MK, dtype, int8=module.activations == "int8")
        ctx.save_for_backward(q_MK, scale_M1, codes_NK, module.scale)
        ctx.module = module
        ctx.dtype = x_MK.dtype
        return product(q_MK, scale_M1, codes_NK, module.scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, None]:
        (grad_MN,) = grads
        q_MK, scale_M1, codes_NK, scale = ctx.saved_tensors
        if not ctx.module.frozen:
            ctx.module.add_gradient(weight_gradient(grad_MN, q_MK, scale_M1))
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = input_gradient(grad_MN, codes_NK, scale).to(ctx.dtype)
        return grad_x, None, None, None


class DirectLinear(nn.Module):
    """A linear without bias whose weights are integers.

    Args:
        weight_NK: float weight that the codes are rounded from.
        levels: ``ternary`` or ``int8``.
        activations: ``int8`` rounds each row of the input, scaled by its largest element.

    Attributes:
        weight: buffer: packed trits, uint8 ``[N, 32 * ceil(K / 128)]``, or int8 ``[N, K]``.
        scale: buffer, a float32 scalar.
        control: buffer, int64 ``[4]``: inputs of the counter hash of stochastic rounding.
        gradient: gradient with respect to the dense weight, float32 ``[N, K]``, between backward
            and the step, or ``zero_grad``; else None.
        frozen: the codes do not learn.
    """

    weight: Tensor
    scale: Tensor
    control: Tensor

    def __init__(
        self, weight_NK: Tensor, *, levels: Levels = "ternary", activations: str = "float"
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight_NK.shape
        self.levels: Levels = levels
        self.activations = activations
        self.limit = LIMITS[levels]
        self.stored_weights = weight_NK.numel()
        self.frozen = False
        self.gradient: Tensor | None = None
        wide = weight_NK.detach().float()
        scale = _first_scale(wide, levels)
        codes = torch.div(wide, scale).round_().clamp_(-self.limit, self.limit)
        self.register_buffer("weight", self._stored(codes))
        self.register_buffer("scale", scale)
        self.register_buffer("control", new_control())

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradient between backward and step."""
        return 0 if self.frozen else 4 * self.stored_weights

    # A compiled graph would break here anyway because the gradient is set on the module.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x: Tensor) -> Tensor:
        """Multiply ``x[..., K] -> [..., N]``, in the dtype of autocast if it is enabled."""
        learns = torch.is_grad_enabled() and not self.frozen
        # Backward must reach this module even if nothing before it learns.
        anchor = torch.empty(0, requires_grad=True) if learns else None
        y_MN: Tensor = _DirectProduct.apply(  # type: ignore[no-untyped-call]
            x.reshape(-1, self.in_features), anchor, self, compute_dtype(x)
        )
        return y_MN.view(*x.shape[:-1], self.out_features)

    def codes(self) -> Tensor:
        """Return the codes, int8 ``[N, K]``; for int8 levels the stored tensor itself."""
        if self.levels == "ternary":
            return unpack_trits(self.weight, self.in_features)
        return self.weight

    @torch.no_grad()
    def set_codes(self, codes_NK: Tensor) -> None:
        """Store ``codes_NK``, integers within the levels, in place."""
        self.weight.copy_(self._stored(codes_NK))

    def dense_weight(self) -> Tensor:
        """Return ``scale * C``, float32 ``[N, K]``."""
        return self.codes().float().mul_(self.scale)

    @torch.no_grad()
    def add_gradient(self, gradient_NK: Tensor) -> None:
        """Add the gradient of one backward pass."""
        if self.gradient is None:
            self.gradient = gradient_NK.float()
        else:
            self.gradient += gradient_NK

    def extra_repr(self) -> str:
        return (
            f"{self.in_features}, {self.out_features}, levels={self.levels}, "
            f"activations={self.activations}"
        )

    def _stored(self, codes_NK: Tensor) -> Tensor:
        codes_NK = codes_NK.to(torch.int8)
        return pack_trits(codes_NK) if self.levels == "ternary" else codes_NK


def _first_scale(weight_NK: Tensor, levels: Levels) -> Tensor:
    """Return the scale for a float weight; one of zeros counts as Gaussian of variance 1 / K."""
    magnitudes = weight_NK.abs()
    deviation = 1 / math.sqrt(weight_NK.shape[1])
    if levels == "ternary":
        mean = magnitudes.mean()
        return torch.where(mean > 0, mean, math.sqrt(2 / math.pi) * deviation)
    largest = magnitudes.amax()
    return torch.where(largest > 0, largest, 4 * deviation) * (2 / 127)


class DirectDecoder(Decoder):
    """The decoder with :class:`DirectLinear` modules in its blocks."""

    def __init__(self, config: DirectConfig, vocabulary_size: int) -> None:
        super().__init__(config, vocabulary_size)

        def direct(linear: FloatLinear) -> DirectLinear:
            return DirectLinear(linear.weight, levels=config.levels, activations=linear.activations)

        replace_linears(self.blocks, direct)


def build(config: DirectConfig, vocabulary_size: int) -> DirectDecoder:
    """Build the model ``direct``."""
    return DirectDecoder(config, vocabulary_size)
