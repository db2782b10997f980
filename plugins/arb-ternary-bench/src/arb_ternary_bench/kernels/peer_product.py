"""A peer's matrix product in a cell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from attrs import frozen
from numpy.typing import NDArray


@frozen
class PeerProduct:
    """A peer's matrix product, ready to run.

    Attributes:
        run: multiplies with copy ``i`` of the weight and writes ``output``, or returns a tensor if
            that is None.
        copies: number of copies of the weight.
        weight_bytes: bytes of one copy.
        output: float32 ``[M, N]``.
        keeps: objects that have to live as long as this.
    """

    run: Callable[[int], Any]
    copies: int
    weight_bytes: int
    output: NDArray[np.float32] | None
    keeps: object


def aligned(nbytes: int, alignment: int = 64) -> NDArray[np.uint8]:
    """Return fresh bytes whose address is a multiple of ``alignment``."""
    raw = np.empty(nbytes + alignment, np.uint8)
    start = -raw.ctypes.data % alignment
    return raw[start : start + nbytes]
