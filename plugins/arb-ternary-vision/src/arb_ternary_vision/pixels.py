"""Pixels of images as bytes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from arb_ternary.errors import ArbError


def to_bytes(image: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Convert ``[C, H, W]`` in [-1, 1] to bytes: ``[H, W]``, or ``[H, W, 3]`` of three channels.

    Raises:
        ArbError: it has neither one channel nor three.
    """
    pixels = np.clip(np.rint((image + 1) * 127.5), 0, 255).astype(np.uint8)
    if len(pixels) not in (1, 3):
        raise ArbError(
            f"images of {len(pixels)} channels cannot be drawn: they must have 1 (grey) or 3 "
            f"(red, green and blue)"
        )
    return pixels[0] if len(pixels) == 1 else np.ascontiguousarray(pixels.transpose(1, 2, 0))
