"""Where the float factor of a ternary linear goes in a file.

llama.cpp multiplies what most linears give by a tensor ``.scale``. It refuses one of the head, and
its ``arcee`` graph reads those of the feed-forward layer without using them. There the factor goes
into the gain of the norm before: a head is linear, and of ``down(relu(up(g x))^2)`` the factors
``d`` of down and ``u`` of up are a factor ``u sqrt(d)`` of ``g``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping


def is_in_gain(path: str, architecture: str) -> bool:
    """Whether the factor of the linear at ``path`` goes into the gain of a norm."""
    in_feed_forward = path.endswith((".feed_forward.up", ".feed_forward.down"))
    return path == "head" or (architecture == "arcee" and in_feed_forward)


def gains_of_scales(scales: Mapping[str, float], architecture: str) -> dict[str, float]:
    """The factors of norms, by path, that stand for those of ``scales`` for which
    :func:`is_in_gain` is true.
    """
    gains: dict[str, float] = {}
    for path, scale in scales.items():
        if not is_in_gain(path, architecture):
            continue
        norm = "final_norm" if path == "head" else f"{path.rpartition('.')[0]}.norm"
        gains[norm] = gains.get(norm, 1.0) * (math.sqrt(scale) if path.endswith(".down") else scale)
    return gains
