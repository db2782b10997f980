"""Smallest exponents of rows and of columns: the units of integer products, kept while the exponents are unchanged."""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock
from typing import Final
from weakref import ref

from attrs import frozen
from torch import Tensor, int32, stack

from arb_ternary.backends.integer import MAX_SPREAD
from arb_ternary.backends.protocol import WeightShape

__all__ = ["INT8_SPREAD", "Floors", "check_spread", "floors_of"]

#: Exponents that spread at most this far share one int8 matrix: 1 << 6 = 64.
INT8_SPREAD: Final = 6
#: Weights whose floors are kept.
_KEPT: Final = 4096


@frozen(eq=False)
class Floors:
    """Units of sums over a row, and over a column, of the weight.

    Attributes:
        rows: int32 ``[N]``, the smallest exponent of each row.
        columns: int32 ``[K]``, the smallest exponent in each column.
        row_spread: how far exponents of one row exceed its smallest, at most.
        column_spread: likewise of one column.
    """

    rows: Tensor
    columns: Tensor
    row_spread: int
    column_spread: int


_kept: OrderedDict[int, tuple[ref[Tensor], int, WeightShape, Floors]] = OrderedDict()
_lock = Lock()


def floors_of(exponent: Tensor, shape: WeightShape) -> Floors:
    """The floors of int8 exponents ``[N, J]`` of a weight that is not empty.

    The host waits for the device once after each change of the exponents, because the spread chooses the kernel.
    """
    if exponent.is_inference():
        return _measure(exponent, shape)
    version = exponent._version
    with _lock:
        found = _kept.get(id(exponent))
        if found is not None and found[0]() is exponent and found[1:3] == (version, shape):
            _kept.move_to_end(id(exponent))
            return found[3]
    floors = _measure(exponent, shape)
    with _lock:
        _kept[id(exponent)] = (ref(exponent), version, shape, floors)
        for key in [key for key, entry in _kept.items() if entry[0]() is None]:
            del _kept[key]
        while len(_kept) > _KEPT:
            _kept.popitem(last=False)
    return floors


def check_spread(spread: int) -> None:
    """Refuse exponents that spread so far that 64 bits do not hold the sum for K = 2**16."""
    if spread > MAX_SPREAD:
        raise ValueError(f"exponents spread over {spread}; the exact integer product takes at most {MAX_SPREAD}")


def _measure(exponent: Tensor, shape: WeightShape) -> Floors:
    wide = exponent.to(int32)
    rows, columns = wide.amin(dim=1), wide.amin(dim=0)
    spreads = stack([(wide.amax(dim=1) - rows).amax(), (wide.amax(dim=0) - columns).amax()]).tolist()
    if shape.groups == 1:
        spread_out = columns.expand(shape.in_features)
    else:
        spread_out = columns.repeat_interleave(shape.group_size)[: shape.in_features]
    return Floors(rows, spread_out.contiguous(), *spreads)
