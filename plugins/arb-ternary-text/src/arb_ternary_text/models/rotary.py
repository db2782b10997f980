"""Rotary position embedding (Su et al., RoFormer, 2021), in the half-split form of Llama.

Angles are computed in each forward pass and not registered, because a pure model has no float
buffer. They are computed in float64 where the device has it, so that a stream of millions of tokens
keeps exact relative positions.

Shapes: ``S`` positions, ``C`` features of a head, ``P = C / 2`` planes of rotation.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def rotary_angles(
    start: int,
    length: int,
    head_dim: int,
    base: float,
    *,
    scaling: float = 1.0,
    factors: Sequence[float] | None = None,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines, each ``[S, P]``, of the angles of positions.

    An angle is ``position / scaling * base**(-2 p / C) / factors[p]``.

    Args:
        start: the first position.
        length: number of positions.
        head_dim: ``C``.
        base: longest wavelength over 2 pi.
        scaling: divides positions.
        factors: one per plane, which turns slower by it; None = 1 for all.
        dtype: dtype of the result.
        device: device of the result.
    """
    exact = torch.float32 if device.type == "mps" else torch.float64
    position_S = torch.arange(start, start + length, dtype=exact, device=device)
    speed_P = rotary_speeds(head_dim, base, factors, dtype=exact, device=device)
    angle_SP = (position_S if scaling == 1.0 else position_S / scaling)[:, None] * speed_P
    return angle_SP.cos().to(dtype), angle_SP.sin().to(dtype)


def rotary_speeds(
    head_dim: int,
    base: float,
    factors: Sequence[float] | None,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Return the angle of each plane per position, ``base**(-2 p / C) / factors[p]``: ``[P]``."""
    plane_P = torch.arange(0, head_dim, 2, dtype=dtype, device=device)
    speed_P = base ** (-plane_P / head_dim)
    if factors is None:
        return speed_P
    return speed_P / torch.tensor(factors, dtype=dtype, device=device)


def rotate(x_BHSC: Tensor, cos_SP: Tensor, sin_SP: Tensor) -> Tensor:
    """Turn each plane of features ``p`` and ``p + P`` by the angle of its position.

    The result has the dtype of ``x_BHSC``.
    """
    first, second = x_BHSC.chunk(2, dim=-1)
    rotated = torch.cat(
        (first * cos_SP - second * sin_SP, second * cos_SP + first * sin_SP), dim=-1
    )
    return rotated.to(x_BHSC.dtype)
