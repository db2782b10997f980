"""A config before it is structured: plain values, and where each of them came from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import field, frozen

from arb_ternary.config.errors import Fault
from arb_ternary.config.paths import Origin, Path

__all__ = ["Document"]


@frozen(eq=False)
class Document:
    """Plain values with their origins.

    Attributes:
        data: nested dicts and lists of text, numbers, booleans and None.
        source: the file's name as the user gave it; empty when there is no file.
        origins: by path; a value without an entry came with the value around it.
        faults: what reading found; structuring adds to them, so that all are reported at once.
    """

    data: Any
    source: str = ""
    origins: Mapping[Path, Origin] = field(factory=dict)
    faults: tuple[Fault, ...] = ()
