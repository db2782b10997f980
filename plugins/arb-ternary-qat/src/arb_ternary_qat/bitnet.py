"""BitNet b1.58: linears with float master weights and a ternary, int8 forward pass.

Source: Ma et al., "The Era of 1-bit LLMs: All Large Language Models are in 1.58 Bits", 2024
(arXiv:2402.17764), with the quantisers of Microsoft's "The Era of 1-bit LLMs: Training Tips, Code
and FAQ", 2024. Every forward pass computes from a weight ``w [N, K]``::

    gamma = mean |w|     T = clip(round(w / gamma), -1, 1)     W = gamma T

The gradient of a rounding is that of the identity (straight through): ``dw = dW``. With an input
``x [M, K]``::

    s_m = max_k |x_mk| / 127     q = round(x / s)     y = (q s) @ W.T
    dx = dy @ W                  dW = dy.T @ (q s)

``q`` and ``T`` are integers of at most 8 bits, which bfloat16 represents exactly, and scales are
applied to products in float32: under autocast only sums are rounded. The norm in front of each
linear belongs to the model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn

from arb_ternary.errors import ComponentError, ConfigError
from arb_ternary_interchange.decoder.weights import TernaryWeight
from arb_ternary_qat.config import BitnetConfig, BitnetOfConfig
from arb_ternary_text.models.decoder import Decoder
from arb_ternary_text.models.parts import FloatLinear

#: Smallest mean of |w|, as published; below it all weights of a matrix round towards zero.
MIN_SCALE = 1e-5


def absmean_ternary(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return trits of ``weight`` and their scale, the mean of ``|weight|``; at least float32."""
    wide = weight.detach().to(torch.promote_types(weight.dtype, torch.float32))
    scale = wide.abs().mean().clamp_min(MIN_SCALE)
    return torch.div(wide, scale).round_().clamp_(-1, 1), scale


def absmax_int8(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    """Return integers in [-127, 127] of each row, as floats, and the rows' scales ``[M, 1]``."""
    wide = x_MK.detach().to(torch.promote_types(x_MK.dtype, torch.float32))
    scale_M1 = (wide.abs().amax(dim=-1, keepdim=True) / 127).clamp_min(torch.finfo(wide.dtype).tiny)
    return torch.div(wide, scale_M1).round_(), scale_M1


class _BitProduct(torch.autograd.Function):
    """Product with the ternary weight, straight through to ``x`` and the master weight."""

    @staticmethod
    def forward(
        ctx: Any, x_MK: Tensor, weight_NK: Tensor, dtype: torch.dtype, int8: bool
    ) -> Tensor:
        trits_NK, gamma = absmean_ternary(weight_NK)
        trits_NK = trits_NK.to(dtype)
        q_MK, scale_M1 = absmax_int8(x_MK) if int8 else (x_MK.detach(), None)
        q_MK = q_MK.to(dtype)
        ctx.save_for_backward(q_MK, scale_M1, trits_NK, gamma)
        ctx.dtypes = x_MK.dtype, weight_NK.dtype
        # The factor has dimensions, so that a bfloat16 product is scaled in float32 and rounded
        # once.
        factor = gamma.view(1, 1) if scale_M1 is None else scale_M1 * gamma
        return (q_MK @ trits_NK.t()).mul_(factor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (grad_MN,) = grads
        q_MK, scale_M1, trits_NK, gamma = ctx.saved_tensors
        x_dtype, weight_dtype = ctx.dtypes
        grad_x = None
        grad_w = None
        if ctx.needs_input_grad[0]:
            grad_x = (grad_MN @ trits_NK).mul_(gamma.view(1, 1)).to(x_dtype)
        if ctx.needs_input_grad[1]:
            scaled_MN = grad_MN if scale_M1 is None else (grad_MN * scale_M1).to(q_MK.dtype)
            grad_w = (scaled_MN.t() @ q_MK).to(weight_dtype)
        return grad_x, grad_w, None, None


class BitLinear(FloatLinear):
    """A linear without bias whose float ``weight`` is rounded to ternary in every forward pass.

    With ``activations="int8"`` each row of the input is rounded to int8, scaled by its largest
    element.
    """

    def product(self, x: Tensor) -> Tensor:
        """Multiply ``x[..., K] -> [..., N]``, in the dtype of autocast if it is enabled."""
        x_MK = x.reshape(-1, self.in_features)
        device = x.device.type
        dtype = x.dtype
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        y_MN: Tensor = _BitProduct.apply(  # type: ignore[no-untyped-call]
            x_MK, self.weight, dtype, self.activations == "int8"
        )
        return y_MN.view(*x.shape[:-1], self.out_features)

    def trits(self) -> Tensor:
        """Return the trits of a forward pass, int8 ``[N, K]``."""
        return absmean_ternary(self.weight)[0].to(torch.int8)

    def ternary_weight(self) -> TernaryWeight:
        """Return ``gamma T``, for exporters."""
        trits, gamma = absmean_ternary(self.weight)
        exponent = torch.zeros(self.out_features, 1, dtype=torch.int8)
        return TernaryWeight(
            trits.to(device="cpu", dtype=torch.int8), exponent, self.in_features, float(gamma)
        )


#: Ternary class for each class of float linears.
_BIT_CLASSES: Final[dict[type[FloatLinear], type[BitLinear]]] = {FloatLinear: BitLinear}


def _bit_class(kind: type[FloatLinear]) -> type[BitLinear]:
    """Return a subclass of ``kind`` with the product of :class:`BitLinear`."""
    if kind not in _BIT_CLASSES:
        _BIT_CLASSES[kind] = type(f"Bit{kind.__name__}", (BitLinear, kind), {})
    return _BIT_CLASSES[kind]


def make_bit_linears(root: nn.Module, *, but: Callable[[str], bool] = lambda name: False) -> int:
    """Turn the float linears in ``root`` into :class:`BitLinear` modules, and return their number.

    A subclass of ``FloatLinear`` keeps its own ``forward``: a convolution stays one.

    Args:
        root: the module; names are relative to it.
        but: returns whether the linear of this name stays float.
    """
    count = 0
    for name, module in root.named_modules():
        if isinstance(module, BitLinear) or but(name):
            continue
        if isinstance(module, FloatLinear):
            module.__class__ = _bit_class(type(module))
            count += 1
    return count


class BitnetDecoder(Decoder):
    """The decoder with :class:`BitLinear` blocks; the head stays float, as published.

    Its initial weights are those of the float decoder of the same seed.
    """

    def __init__(self, config: BitnetConfig, vocabulary_size: int) -> None:
        super().__init__(config, vocabulary_size)
        make_bit_linears(self.blocks)


def build(config: BitnetConfig, vocabulary_size: int) -> BitnetDecoder:
    """Build the model ``bitnet``."""
    return BitnetDecoder(config, vocabulary_size)


def build_of(config: BitnetOfConfig, vocabulary_size: int) -> nn.Module:
    """Build the model ``bitnet_of``: the inner model with ternary linears outside its heads.

    Raises:
        ConfigError: there are none.
        ComponentError: the inner model's factory makes no module.
    """
    inner = config.model
    model = inner.build(vocabulary_size)
    if not isinstance(model, nn.Module):
        raise ComponentError(
            f"model {inner.name!r}: its factory returned a {type(model).__name__}, not a module"
        )
    if not make_bit_linears(model, but=is_of_head):
        raise ConfigError(
            f"model bitnet_of: the model {inner.name!r} has no float linear outside its head",
            "Name linears in the `float_parts` of the inner model.",
        )
    return model


def is_of_head(name: str) -> bool:
    """Return whether a qualified name is that of a head or of a part of one."""
    return "head" in name.split(".")
