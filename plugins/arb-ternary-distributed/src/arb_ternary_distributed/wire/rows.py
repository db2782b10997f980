"""The rows of a weight that a rank owns, and those rows of a packed weight."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor

from arb_ternary.backends.dispatch import kernel
from arb_ternary.backends.protocol import WeightShape


def row_bounds(rows: int, size: int) -> list[tuple[int, int]]:
    """Return the first row of each of ``size`` ranks and the row after its last.

    Rows are cut as DTensor's ``Shard(0)`` cuts them: every rank has ``ceil(rows / size)`` rows but
    the last ranks, which have fewer or none.

    Raises:
        ValueError: rows are negative, or there is no rank.
    """
    if rows < 0 or size < 1:
        raise ValueError(
            f"rows must be 0 or more and ranks 1 or more, got {rows} rows on {size} ranks"
        )
    chunk = -(-rows // size)
    edges = [min(rank * chunk, rows) for rank in range(size + 1)]
    return [*pairwise(edges)]


def weight_rows(weight: Tensor, shape: WeightShape, first: int, last: int) -> Tensor:
    """Return rows ``first .. last - 1`` of a packed weight of the torch backend: a view of it."""
    return weight[first:last]


def repacked_rows(
    backend: str,
    weight: Tensor,
    shape: WeightShape,
    first: int,
    last: int,
) -> Tensor:
    """Return the rows of :func:`weight_rows` for any layout: a copy, through all trits."""
    trits = kernel(backend, "unpack")(weight, shape)
    packed: Tensor = kernel(backend, "pack")(trits[first:last])
    return packed
