"""Smallest exponents of rows and of columns: the units of integer products, kept while the
exponents are unchanged.

How far the exponents spread chooses the kernel of a product, so the host has to know it. Where a
kernel moves exponents, it sets off that transfer by itself; the optimizer's own transfer at the end
of its step comes after it on the stream, so that the next product finds the numbers on the host.
"""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock
from typing import Any, Final
from weakref import ref

import torch
from attrs import frozen
from torch import Tensor, int32, stack

from arb_ternary.backends.integer import MAX_SPREAD
from arb_ternary.backends.protocol import WeightShape

#: Exponents that spread at most this far share one int8 matrix: 1 << 6 = 64.
INT8_SPREAD: Final = 6
#: Weights whose floors are kept.
_KEPT: Final = 4096


class Arriving:
    """Integers of a device on their way to the host, which waits only if it asks before they are
    there.
    """

    def __init__(self, numbers: Tensor) -> None:
        # pinned, where the transfer need not be waited for
        self._numbers = numbers.to("cpu", non_blocking=True)
        self._sent: Any = (
            torch.cuda.current_stream(numbers.device).record_event() if numbers.is_cuda else None
        )
        self._read: list[int] | None = None

    def read(self) -> list[int]:
        """The numbers; every product asks, and the first waits."""
        if self._read is None:
            if self._sent is not None:
                self._sent.synchronize()
            self._read = self._numbers.tolist()
        return self._read


@frozen(eq=False)
class Floors:
    """Units of sums over a row, and over a column, of the weight.

    Attributes:
        rows: int32 ``[N]``, the smallest exponent of each row.
        columns: int32 ``[K]``, the smallest exponent in each column.
        spreads: how far exponents of one row exceed its smallest, at most, and likewise of one
            column.
    """

    rows: Tensor
    columns: Tensor
    spreads: Arriving

    @property
    def row_spread(self) -> int:
        """How far exponents of one row exceed its smallest, at most."""
        return self.spreads.read()[0]

    @property
    def column_spread(self) -> int:
        """How far exponents of one column exceed its smallest, at most."""
        return self.spreads.read()[1]


_kept: OrderedDict[int, tuple[ref[Tensor], int, WeightShape, Floors]] = OrderedDict()
_lock = Lock()


def floors_of(exponent: Tensor, shape: WeightShape) -> Floors:
    """The floors of int8 exponents ``[N, J]`` of a weight that is not empty.

    Where something else than :func:`renew_floors` has seen the exponents change (a checkpoint was
    loaded), the host waits for the device once, because the spread chooses the kernel.
    """
    if exponent.is_inference():
        return _measure(exponent, shape)
    version = exponent._version
    with _lock:
        found = _kept.get(id(exponent))
        if found is not None and found[0]() is exponent and found[1:3] == (version, shape):
            _kept.move_to_end(id(exponent))
            return found[3]
    return _keep(exponent, version, shape)


def renew_floors(exponent: Tensor) -> None:
    """Find the floors of exponents that a kernel has just moved, if a product has asked for them
    before.
    """
    if exponent.is_inference():
        return
    with _lock:
        found = _kept.get(id(exponent))
    if found is not None and found[0]() is exponent:
        _keep(exponent, exponent._version, found[2])


def _keep(exponent: Tensor, version: int, shape: WeightShape) -> Floors:
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
        raise ValueError(
            f"exponents spread over {spread}; the exact integer product takes at most {MAX_SPREAD}"
        )


def _measure(exponent: Tensor, shape: WeightShape) -> Floors:
    wide = exponent.to(int32)
    rows = wide.amin(dim=1)
    columns = wide.amin(dim=0)
    spreads = Arriving(
        stack([(wide.amax(dim=1) - rows).amax(), (wide.amax(dim=0) - columns).amax()])
    )
    if shape.groups == 1:
        spread_out = columns.expand(shape.in_features)
    else:
        spread_out = columns.repeat_interleave(shape.group_size)[: shape.in_features]
    return Floors(rows, spread_out.contiguous(), spreads)
