"""Levels: a weight's exponents relative to a floor, cached while the exponents are unchanged.

Integer sums are taken over ``T << (E - floor)``. How far the exponents spread decides how many
passes that takes, so the host has to know it, once for each change of the exponents by their
version counter. When a kernel has moved them, that transfer starts at once; the optimizer's own
transfer at the end of its step comes after it on the stream, so that the next product finds the
number on the host.
"""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock
from typing import Any, Final
from weakref import ref

import torch
from attrs import define
from torch import Tensor

from arb_ternary.backends.integer import MAX_SPREAD
from arb_ternary.backends.protocol import WeightShape

#: Shifts that one int8 product serves: 1 << 6 = 64 fits in int8, a shift more does not.
BAND: Final = 7
#: Exponent tensors whose levels are kept.
_KEPT: Final = 4096


class Arriving:
    """An integer on its way from a device to the host, which waits only when it reads it."""

    def __init__(self, number: Tensor) -> None:
        # Pinned memory if the number is on a GPU: the transfer need not be waited for.
        self._number = number.to("cpu", non_blocking=True)
        self._sent: Any = None
        if number.is_cuda:
            stream = torch.cuda.current_stream(number.device)
            self._sent = stream.record_event()

    def read(self) -> int:
        """Wait for the number and return it."""
        if self._sent is not None:
            self._sent.synchronize()
        (found,) = self._number.reshape(1).tolist()
        return int(found)


@define(eq=False)
class Levels:
    """Exponents relative to a floor.

    Attributes:
        floor: int32, one number per row of the weight, or per column if sums run over rows.
        above: uint8 ``[N, J]``, ``E - floor``.
        largest: the largest element of ``above``.
    """

    floor: Tensor
    above: Tensor
    largest: Arriving
    _bands: tuple[Tensor, ...] | None = None

    @property
    def bands(self) -> tuple[Tensor, ...]:
        """Levels of each pass, int8 ``[N, J]``.

        A level is ``E - floor - 7 * pass``, or -1 where another pass serves the group.

        Raises:
            ValueError: exponents spread over more than 40: the sums would overflow 64 bits.
        """
        if self._bands is None:
            most = self.largest.read()
            above = self.above.to(torch.int16)
            if most > MAX_SPREAD:
                raise ValueError(
                    f"exponents spread over {most}; the exact integer product takes at most "
                    f"{MAX_SPREAD}"
                )
            bands = []
            for low in range(0, most + 1, BAND):
                inside = (above >= low) & (above < low + BAND)
                band = torch.where(inside, above - low, -1)
                bands.append(band.to(torch.int8))
            self._bands = tuple(bands)
        return self._bands


_lock = Lock()
_found: OrderedDict[tuple[int, bool], tuple[ref[Tensor], int, WeightShape, Levels]] = OrderedDict()


def levels_of(exponent: Tensor, shape: WeightShape, turned: bool) -> Levels:
    """Return levels above the smallest exponent of each row, or of each column if ``turned``."""
    if exponent.is_inference():
        return _levels(exponent, shape, turned)
    key = (id(exponent), turned)
    version = exponent._version
    with _lock:
        entry = _found.get(key)
        if entry is not None and entry[0]() is exponent and entry[1:3] == (version, shape):
            _found.move_to_end(key)
            return entry[3]
    return _keep(exponent, version, shape, turned)


def renew_levels(exponent: Tensor) -> None:
    """Recompute the cached levels of exponents that a kernel has just moved."""
    if exponent.is_inference():
        return
    for turned in (False, True):
        with _lock:
            entry = _found.get((id(exponent), turned))
        if entry is not None and entry[0]() is exponent:
            _keep(exponent, exponent._version, entry[2], turned)


def _keep(exponent: Tensor, version: int, shape: WeightShape, turned: bool) -> Levels:
    made = _levels(exponent, shape, turned)
    with _lock:
        _found[id(exponent), turned] = (ref(exponent), version, shape, made)
        while len(_found) > _KEPT:
            _found.popitem(last=False)
    return made


def _levels(exponent: Tensor, shape: WeightShape, turned: bool) -> Levels:
    wide = exponent.to(torch.int32)
    floor = wide.amin(dim=0 if turned else 1, keepdim=True)
    above = wide - floor
    if turned:
        floor = floor.repeat_interleave(shape.group_size, dim=1)
        floor = floor[:, : shape.in_features]
    return Levels(
        floor=floor.flatten().contiguous(),
        above=above.to(torch.uint8),
        largest=Arriving(above.amax()),
    )
