"""Sizes in pixels as configs state them. This module does not import torch."""

from __future__ import annotations

from typing import Any, Final, TypeAlias

from arb_ternary.config.options import Rule

Pair: TypeAlias = tuple[int, int]

#: Longest side of an image, a bound against a mistyped number that would allocate for minutes.
MAX_SIDE: Final = 8192
#: Most numbers per pixel: instruments that split light into bands have hundreds.
MAX_CHANNELS: Final = 4096


def pair(value: int | Pair) -> Pair:
    """Return height and width; one number stands for both."""
    return (value, value) if isinstance(value, int) else (value[0], value[1])


def _is_size(value: Any) -> bool:
    sides = (value,) if isinstance(value, int) else value
    return all(type(side) is int and 1 <= side <= MAX_SIDE for side in sides)


#: Validator of a size in pixels: one number for squares, or height and width.
size: Final = Rule(
    f"from 1 to {MAX_SIDE} pixels, or two such numbers, height and width", _is_size, {}
)
