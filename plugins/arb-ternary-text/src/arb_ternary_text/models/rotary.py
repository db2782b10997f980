"""Rotary position embedding (Su et al., RoFormer, 2021), in the half-split form of GPT-NeoX and Llama.

Angles are computed for each forward pass and never registered: a pure model has no float buffer. They are computed in
float64 where the device has it, so that a stream of millions of tokens keeps exact relative positions.

Shapes: ``S`` positions, ``C`` features of a head, ``P = C / 2`` planes of rotation.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["rotary_angles", "rotate"]


def rotary_angles(
    start: int, length: int, head_dim: int, base: float, *, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each ``[S, P]``, of ``position * base**(-2 p / C)``, ``length`` of them from ``start``."""
    exact = torch.float32 if device.type == "mps" else torch.float64
    position_S = torch.arange(start, start + length, dtype=exact, device=device)
    plane_P = torch.arange(0, head_dim, 2, dtype=exact, device=device)
    angle_SP = position_S[:, None] * base ** (-plane_P / head_dim)
    return angle_SP.cos().to(dtype), angle_SP.sin().to(dtype)


def rotate(x_BHSC: Tensor, cos_SP: Tensor, sin_SP: Tensor) -> Tensor:
    """Turn each plane, spanned by features ``p`` and ``p + P``, by the angle of its position; dtype as ``x_BHSC``."""
    first, second = x_BHSC.chunk(2, dim=-1)
    rotated = torch.cat((first * cos_SP - second * sin_SP, second * cos_SP + first * sin_SP), dim=-1)
    return rotated.to(x_BHSC.dtype)
