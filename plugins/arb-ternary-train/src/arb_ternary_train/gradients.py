"""The norm of a model's float gradients."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn


def gradient_norm(parameters: Iterable[Tensor], clip_to: float | None = None) -> float | None:
    """Return the norm of all float gradients, and clip them; None if there is no gradient.

    Without clipping the norm says whether all gradients are finite.
    """
    trained = [parameter for parameter in parameters if parameter.grad is not None]
    if not trained:
        return None
    if clip_to is not None:
        return float(nn.utils.clip_grad_norm_(trained, clip_to))
    return float(nn.utils.get_total_norm([p.grad for p in trained if p.grad is not None]))
