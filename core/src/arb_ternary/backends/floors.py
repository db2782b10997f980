"""Smallest exponents of rows and columns, kept while the exponents are unchanged.

They are the units of integer products. The spread of the exponents decides the kernel of a product,
so the host has to know it. A kernel that moves exponents starts that transfer by itself. The
optimizer's own transfer at the end of its step comes later on the stream, so the next product finds
the numbers on the host.
"""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock
from typing import Any, Final
from weakref import ref

import torch
from attrs import frozen
from torch import Tensor

from arb_ternary.backends.protocol import WeightShape

#: Weights whose floors are kept.
_KEPT: Final = 4096


class Arriving:
    """Integers on their way from a device to the host.

    The host waits only if it reads them before they have arrived.
    """

    def __init__(self, numbers: Tensor) -> None:
        # Pinned memory, so the transfer runs in the background.
        self._numbers = numbers.to("cpu", non_blocking=True)
        self._sent: Any = None
        if numbers.is_cuda:
            self._sent = torch.cuda.current_stream(numbers.device).record_event()
        self._read: list[int] | None = None

    def read(self) -> list[int]:
        """Return the numbers; the first call waits for them."""
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
        spreads: largest distance of an exponent from the smallest of its row, and of its column.
    """

    rows: Tensor
    columns: Tensor
    spreads: Arriving

    @property
    def row_spread(self) -> int:
        """Largest distance of an exponent from the smallest of its row."""
        return self.spreads.read()[0]

    @property
    def column_spread(self) -> int:
        """Largest distance of an exponent from the smallest of its column."""
        return self.spreads.read()[1]


@frozen(eq=False)
class _Entry:
    """The floors of one version of an exponent tensor."""

    exponent: ref[Tensor]
    version: int
    shape: WeightShape
    floors: Floors

    def serves(self, exponent: Tensor, shape: WeightShape) -> bool:
        """Return whether the floors are those of ``exponent`` as it is now."""
        same = self.exponent() is exponent and self.version == exponent._version
        return same and (self.shape is shape or self.shape == shape)


_kept: OrderedDict[int, _Entry] = OrderedDict()
_lock = Lock()


def floors_of(exponent: Tensor, shape: WeightShape) -> Floors:
    """Return the floors of int8 exponents ``[N, J]`` of a weight that is not empty.

    If the exponents changed without :func:`renew_floors` (a checkpoint was loaded), the host waits
    for the device once, because the spread decides the kernel.
    """
    if exponent.is_inference():
        return _measure(exponent, shape)
    with _lock:
        entry = _kept.get(id(exponent))
        if entry is not None and entry.serves(exponent, shape):
            _kept.move_to_end(id(exponent))
            return entry.floors
    return _keep(exponent, shape)


def renew_floors(exponent: Tensor) -> None:
    """Find the floors of exponents that a kernel has just moved, if a product has used them."""
    if exponent.is_inference():
        return
    with _lock:
        entry = _kept.get(id(exponent))
    if entry is not None and entry.exponent() is exponent:
        _keep(exponent, entry.shape)


def _keep(exponent: Tensor, shape: WeightShape) -> Floors:
    version = exponent._version
    floors = _measure(exponent, shape)
    with _lock:
        _kept[id(exponent)] = _Entry(ref(exponent), version, shape, floors)
        for key in [key for key, entry in _kept.items() if entry.exponent() is None]:
            del _kept[key]
        while len(_kept) > _KEPT:
            _kept.popitem(last=False)
    return floors


def _measure(exponent: Tensor, shape: WeightShape) -> Floors:
    wide = exponent.to(torch.int32)
    rows = wide.amin(dim=1)
    columns = wide.amin(dim=0)
    row_spread = (wide.amax(dim=1) - rows).amax()
    column_spread = (wide.amax(dim=0) - columns).amax()
    spreads = Arriving(torch.stack([row_spread, column_spread]))
    if shape.groups == 1:
        columns = columns.expand(shape.in_features)
    else:
        columns = columns.repeat_interleave(shape.group_size)[: shape.in_features]
    return Floors(rows, columns.contiguous(), spreads)
