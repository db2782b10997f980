"""The product of an int8 input and integer weights, with its gradients.

With an input ``x [M, K]`` and a weight ``W = scale * C``, ``C [N, K]`` integers::

    s_m = max_k |x_mk| / 127     q = round(x / s)     y = (q s) @ W.T

The gradient of the rounding is that of the identity (straight through), so that with ``dy`` the
gradient of ``y``, ``dx = dy @ W`` and ``dW = dy.T @ (q s)``.

``q`` and ``C`` are integers of at most 8 bits, which bfloat16 represents exactly, and scales are
applied to products in float32: under autocast only sums are rounded.
"""

from __future__ import annotations

import torch
from torch import Tensor


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of matrix products of ``x``: that of autocast if it is enabled."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def absmax_int8(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    """Return integers in [-127, 127] of each row, as floats, and the rows' scales ``[M, 1]``."""
    wide = x_MK.detach().to(torch.promote_types(x_MK.dtype, torch.float32))
    scale_M1 = (wide.abs().amax(dim=-1, keepdim=True) / 127).clamp_min(torch.finfo(wide.dtype).tiny)
    return torch.div(wide, scale_M1).round_(), scale_M1


def rounded_input(x_MK: Tensor, dtype: torch.dtype, *, int8: bool) -> tuple[Tensor, Tensor | None]:
    """Return ``q`` in ``dtype`` and ``s``; without ``int8`` the input itself and None."""
    if not int8:
        return x_MK.detach().to(dtype), None
    q_MK, scale_M1 = absmax_int8(x_MK)
    return q_MK.to(dtype), scale_M1


def product(q_MK: Tensor, scale_M1: Tensor | None, codes_NK: Tensor, scale: Tensor) -> Tensor:
    """Return ``y [M, N]`` in the dtype of ``q`` and ``codes``."""
    # The factor has dimensions, so that a bfloat16 product is scaled in float32 and rounded once.
    factor = scale.view(1, 1) if scale_M1 is None else scale_M1 * scale
    return (q_MK @ codes_NK.t()).mul_(factor)


def input_gradient(grad_MN: Tensor, codes_NK: Tensor, scale: Tensor) -> Tensor:
    """Return ``dx [M, K]``."""
    return (grad_MN @ codes_NK).mul_(scale.view(1, 1))


def weight_gradient(grad_MN: Tensor, q_MK: Tensor, scale_M1: Tensor | None) -> Tensor:
    """Return ``dW [N, K]``, the gradient with respect to the dense weight."""
    scaled_MN = grad_MN if scale_M1 is None else (grad_MN * scale_M1).to(q_MK.dtype)
    return scaled_MN.t() @ q_MK
