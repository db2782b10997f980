"""Shifts of trits above the floors of a weight, in bands that one int8 product serves.

Integer sums are taken over ``T << (E - floor)``. How far the exponents spread decides how many
bands that takes.
"""

from __future__ import annotations

from typing import Final
from weakref import WeakKeyDictionary

import torch
from attrs import frozen
from torch import Tensor

from arb_ternary.backends.floors import Floors, floors_of
from arb_ternary.backends.integer import INT8_SPREAD, check_spread
from arb_ternary.backends.protocol import WeightShape

#: Shifts that one int8 product serves.
BAND: Final = INT8_SPREAD + 1


@frozen(eq=False)
class Bands:
    """Shifts of a weight's trits.

    Attributes:
        floor: int32, one exponent per row of the weight, or per column if sums run over rows.
        shifts: int8 ``[N, J]`` for each band: ``E - floor - 7 * band``, or -1 where another band
            serves the group.
    """

    floor: Tensor
    shifts: tuple[Tensor, ...]


_known: WeakKeyDictionary[Floors, dict[bool, Bands]] = WeakKeyDictionary()


def bands_of(exponent: Tensor, shape: WeightShape, turned: bool) -> Bands:
    """Return bands above the smallest exponent of each row, or of each column if ``turned``.

    They are kept as long as the floors of the exponents.

    Raises:
        ValueError: exponents spread over more than 40: the sums would overflow 64 bits.
    """
    floors = floors_of(exponent, shape)
    known = _known.setdefault(floors, {})
    found = known.get(turned)
    if found is None:
        found = _bands(exponent, shape, floors, turned)
        known[turned] = found
    return found


def _bands(exponent: Tensor, shape: WeightShape, floors: Floors, turned: bool) -> Bands:
    spread = floors.column_spread if turned else floors.row_spread
    check_spread(spread)
    floor = floors.columns if turned else floors.rows
    smallest = floor[:: shape.group_size] if turned else floor.unsqueeze(1)
    above = exponent.to(torch.int16) - smallest
    shifts = []
    for low in range(0, spread + 1, BAND):
        inside = (above >= low) & (above < low + BAND)
        shifts.append(torch.where(inside, above - low, -1).to(torch.int8))
    return Bands(floor, tuple(shifts))
