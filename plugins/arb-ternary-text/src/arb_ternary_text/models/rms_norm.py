"""RMSNorm (Zhang and Sennrich, 2019), with a backward of its own on a CPU.

There torch takes the norm and its gradient apart into elementwise operations. As one function it is
several times faster in training, where the norms of a small model take as long as its attention.
Elsewhere torch has a fused kernel, and a compiler makes one.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from arb_ternary.ternary.embedding import StoredEps
from arb_ternary_text.models.trit_vector import TritVector


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
    """Return ``x / sqrt(mean(x^2) + eps)`` over the last dimension, in the dtype of ``x``."""
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return F.rms_norm(x, x.shape[-1:], eps=eps)
    y: Tensor = _RMSNorm.apply(x, eps)  # type: ignore[no-untyped-call]
    return y


class RMSNorm(StoredEps, nn.RMSNorm):
    """``nn.RMSNorm`` over the last dimension, computed by :func:`rms_norm`.

    A gain that is a single ternary row has a module of its own,
    :class:`arb_ternary.TernaryRMSNorm`: there the norm itself is the ternary weight.

    Args:
        features: size of the last dimension.
        eps: added to the mean square.
        gain: whether there is a learned gain per feature, 1 at initialisation.
        trits: number of trits that each gain is 1 plus the mean of (``gains``); None makes the
            gains floats (``weight``).
        gradients: as for every ternary module; for gains of trits.
        stored_eps: whether state dicts hold ``eps``.
    """

    eps: float

    def __init__(
        self,
        features: int,
        *,
        eps: float,
        gain: bool,
        trits: int | None = None,
        gradients: str = "float",
        stored_eps: bool = False,
    ) -> None:
        super().__init__(features, elementwise_affine=gain and trits is None)
        self.eps = eps
        self.stored_eps = stored_eps
        self.gains: TritVector | None = None
        if gain and trits is not None:
            self.gains = TritVector(features, trits, gradients=gradients)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x [..., features]``; the result has its dtype."""
        y = rms_norm(x, self.eps)
        if self.gains is not None:
            gains: Tensor = self.gains()
            return y * gains.to(y.dtype)
        return y if self.weight is None else y * self.weight.to(y.dtype)
