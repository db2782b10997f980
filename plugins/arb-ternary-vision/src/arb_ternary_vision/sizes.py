"""Sizes in pixels, as configs give them. Configs are read without torch, which nothing here
imports.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

from arb_ternary.config.options import Rule

Pair: TypeAlias = tuple[int, int]

#: Longest side of an image, a bound against a mistyped number that would allocate for minutes.
MAX_SIDE: Final = 8192


def pair(value: int | Pair) -> Pair:
    """Height and width, of one number both."""
    return (value, value) if isinstance(value, int) else (value[0], value[1])


def _is_size(value: Any) -> bool:
    sides = (value,) if isinstance(value, int) else value
    return all(type(side) is int and 1 <= side <= MAX_SIDE for side in sides)


#: A size in pixels: one number for squares, or height and width.
size: Final = Rule(
    f"from 1 to {MAX_SIDE} pixels, or two such numbers, height and width", _is_size, {}
)
