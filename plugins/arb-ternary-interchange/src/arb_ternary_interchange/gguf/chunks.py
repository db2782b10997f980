"""Large matrices, some rows at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

#: Weights that are encoded or decoded at a time.
_CHUNK: Final = 1 << 22


def row_chunks(rows: int, columns: int) -> Iterator[slice]:
    """The rows of a matrix in pieces that are small enough to have copies of."""
    step = max(1, _CHUNK // columns)
    return (slice(first, min(first + step, rows)) for first in range(0, rows, step))


def chunks(values: NDArray[np.float32]) -> Iterator[NDArray[np.float32]]:
    """``values[N, K]`` in such pieces."""
    return (values[some] for some in row_chunks(*values.shape))
