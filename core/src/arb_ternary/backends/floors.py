"""Smallest exponents of rows and columns, kept while the exponents are unchanged.

They are the units of integer products. The spread of the exponents decides the kernel of a product,
so the host has to know it. A kernel that moves exponents starts that transfer by itself. The
optimizer's own transfer at the end of its step comes later on the stream, so the next product finds
the numbers on the host.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple
from weakref import ref

import torch
from attrs import frozen
from torch import Tensor

from arb_ternary.backends.layout import spread_over_columns
from arb_ternary.backends.protocol import WeightShape


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


class _Entry(NamedTuple):
    """The floors of one version of an exponent tensor."""

    exponent: ref[Tensor]
    version: int
    shape: WeightShape
    floors: Floors


#: By the identity of the tensor of exponents, as long as it lives.
_kept: Final[dict[int, _Entry]] = {}


def floors_of(exponent: Tensor, shape: WeightShape) -> Floors:
    """Return the floors of int8 exponents ``[N, J]`` of a weight that is not empty.

    If the exponents changed without :func:`renew_floors` (a checkpoint was loaded), the host waits
    for the device once, because the spread decides the kernel.
    """
    if exponent.is_inference():
        return _measure(exponent, shape)
    entry = _kept.get(id(exponent))
    if entry is None or entry.version != exponent._version or entry.shape != shape:
        return _keep(exponent, shape)
    return entry.floors


def renew_floors(exponent: Tensor) -> None:
    """Find the floors of exponents that a kernel has just moved, if a product has used them."""
    if exponent.is_inference():
        return
    entry = _kept.get(id(exponent))
    if entry is not None:
        _keep(exponent, entry.shape)


def _keep(exponent: Tensor, shape: WeightShape) -> Floors:
    key = id(exponent)
    version = exponent._version
    floors = _measure(exponent, shape)
    _kept[key] = _Entry(ref(exponent, lambda _: _kept.pop(key, None)), version, shape, floors)
    return floors


def _measure(exponent: Tensor, shape: WeightShape) -> Floors:
    wide = exponent.to(torch.int32)
    rows = wide.amin(dim=1)
    columns = wide.amin(dim=0)
    row_spread = (wide.amax(dim=1) - rows).amax()
    column_spread = (wide.amax(dim=0) - columns).amax()
    spreads = Arriving(torch.stack([row_spread, column_spread]))
    (floor_K,) = spread_over_columns(columns.unsqueeze(0), shape)
    return Floors(rows, floor_K.contiguous(), spreads)
