"""RMSNorm (Zhang and Sennrich, 2019), with a backward of its own on a CPU.

There torch takes the norm and its gradient apart into elementwise operations; as one function it is
several times faster in training, where the norms of a small model take as long as its attention.
Elsewhere torch has a fused kernel, and a compiler makes one.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from arb_ternary.ternary.embedding import TernaryRMSNorm


class _RMSNorm(torch.autograd.Function):
    """``y = x r`` with ``r = rsqrt(mean(x^2) + eps)``, so that ``dx = r (dy - y mean(dy y))``.

    Low-precision input is computed with in float32; the result and the gradient have its dtype.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
        reciprocal = (norm.square() / x.shape[-1] + eps).rsqrt()
        y: Tensor = (x * reciprocal).to(x.dtype)
        ctx.save_for_backward(y, reciprocal)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, None]:
        y, reciprocal = ctx.saved_tensors
        grad = grad_y.to(reciprocal.dtype)
        y = y.to(reciprocal.dtype)
        along = (grad * y).mean(dim=-1, keepdim=True)
        return (torch.addcmul(grad, y, along, value=-1) * reciprocal).to(grad_y.dtype), None


def rms_norm(x: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps)`` over the last dimension, in the dtype of ``x``."""
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return F.rms_norm(x, x.shape[-1:], eps=eps)
    y: Tensor = _RMSNorm.apply(x, eps)  # type: ignore[no-untyped-call]
    return y


class RMSNorm(nn.RMSNorm):
    """``nn.RMSNorm`` over the last dimension, computed by :func:`rms_norm`.

    Args:
        features: size of the last dimension.
        eps: added to the mean square.
        gain: whether there is a learned float gain.
    """

    def __init__(self, features: int, *, eps: float, gain: bool) -> None:
        super().__init__(features, elementwise_affine=gain)
        self.eps: float = eps

    def forward(self, x: Tensor) -> Tensor:
        """``x [..., features]``, normalised, in its dtype."""
        y = rms_norm(x, self.eps)
        return y if self.weight is None else y * self.weight.to(y.dtype)


class OwnEps(nn.Module):
    """A norm whose ``eps`` belongs to its weights: a float64 scalar in state dicts, whatever the
    model is cast to.

    Where a scale in front of a norm is left out, its eps takes the scale's place:
    ``norm(s x, eps) = norm(x, eps / s^2)``.
    """

    eps: Any

    def get_extra_state(self) -> Tensor:
        """The eps, a float64 scalar."""
        return torch.tensor(self.eps, dtype=torch.float64)

    def set_extra_state(self, state: Tensor) -> None:
        """Take the eps of a state dict."""
        self.eps = float(state)


class OwnEpsRMSNorm(OwnEps, RMSNorm):
    """:class:`RMSNorm` with an eps of its own."""


class OwnEpsTernaryRMSNorm(OwnEps, TernaryRMSNorm):
    """``TernaryRMSNorm`` with an eps of its own."""
