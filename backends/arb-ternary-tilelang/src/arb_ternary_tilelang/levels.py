"""What the kernels want to know about a weight's exponents, kept while they are unchanged.

Integer sums are taken over ``T << (E - floor)``. How far the exponents spread decides how many passes that takes, and
finding it out waits for the device: so it is found out once for each change of the exponents, by their version counter.
"""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock
from typing import Final
from weakref import ref

import torch
from attrs import frozen
from torch import Tensor

from arb_ternary.backends.integer import MAX_SPREAD
from arb_ternary.backends.protocol import WeightShape

__all__ = ["BAND", "Levels", "levels_of"]

#: Shifts that one int8 product serves: 1 << 6 = 64 fits in int8, a shift more does not.
BAND: Final = 7
#: Exponent tensors whose levels are kept.
_KEPT: Final = 4096


@frozen(eq=False)
class Levels:
    """Exponents relative to a floor.

    Attributes:
        bands: levels int8 ``[N, J]`` of each pass, ``E - floor - 7 * pass``; -1 where another pass has the group.
        floor: int32, a number a row of the weight, or where sums run over rows a number a column.
    """

    bands: tuple[Tensor, ...]
    floor: Tensor


_lock = Lock()
_found: OrderedDict[tuple[int, bool], tuple[ref[Tensor], int, WeightShape, Levels]] = OrderedDict()


def levels_of(exponent: Tensor, shape: WeightShape, turned: bool) -> Levels:
    """Levels above the smallest exponent of each row, or of each column of groups where ``turned``.

    Raises:
        ValueError: they spread over more than 40, beyond which 64 bits do not hold the sums.
    """
    if exponent.is_inference():
        return _levels(exponent, shape, turned)
    key = (id(exponent), turned)
    with _lock:
        entry = _found.get(key)
        if entry is not None and entry[0]() is exponent and entry[1:3] == (exponent._version, shape):
            _found.move_to_end(key)
            return entry[3]
    version = exponent._version
    made = _levels(exponent, shape, turned)
    with _lock:
        _found[key] = (ref(exponent), version, shape, made)
        while len(_found) > _KEPT:
            _found.popitem(last=False)
    return made


def _levels(exponent: Tensor, shape: WeightShape, turned: bool) -> Levels:
    wide = exponent.to(torch.int32)
    floor = wide.amin(dim=0 if turned else 1, keepdim=True)
    above = wide - floor
    spread = int(above.amax())
    if spread > MAX_SPREAD:
        raise ValueError(f"exponents spread over {spread}; the exact integer product takes at most {MAX_SPREAD}")
    if turned:
        floor = floor.repeat_interleave(shape.group_size, dim=1)[:, : shape.in_features]
    bands = tuple(
        torch.where((above >= low) & (above < low + BAND), above - low, -1).to(torch.int8)
        for low in range(0, spread + 1, BAND)
    )
    return Levels(bands, floor.flatten().contiguous())
