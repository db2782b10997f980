"""What travels between ranks: votes as digits of bytes, and lists of trits that have moved.

Meaning and signatures are those of ``arb_ternary_distributed``, which looks these kernels up by
name.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import torch
from torch import Tensor, get_num_threads

from arb_ternary.backends.arguments import check_mutable, check_readable
from arb_ternary.backends.protocol import WeightShape
from arb_ternary_cpu import _native
from arb_ternary_cpu.arguments import BLOCK, check_packed, packed_shape

#: Bases by their native index, with the digits that a byte holds.
_BASES: Final = {3: (0, 5), 5: (1, 3), 15: (2, 2), 255: (3, 1)}
#: The base that stands for int16 as it is.
_RAW: Final = 65535
#: Four codes of t = 0, as int32: four bytes are a row of a block.
_EMPTY_ROW: Final = 0x55555555


def kernels(isa: int) -> dict[str, Callable[..., object]]:
    """The kernels of this module for the instruction set with this index."""
    return {
        "distributed.digits_to_bytes": partial(_digits_to_bytes, isa),
        "distributed.add_digits_": partial(_add_digits_, isa),
        "distributed.weight_rows": _weight_rows,
        "distributed.flip_list": _flip_list,
        "distributed.apply_flips_": _apply_flips_,
    }


def _width(count: int, base: int) -> int:
    if base == _RAW:
        return 2 * count
    if base not in _BASES:
        raise ValueError(f"base must be one of {[*_BASES, _RAW]}, got {base}")
    return -(-count // _BASES[base][1])


def _digits_to_bytes(isa: int, values: Tensor, base: int) -> Tensor:
    count = values.numel()
    values = check_readable(values, "values", torch.int16, (count,))
    packed = torch.empty(_width(count, base), dtype=torch.uint8)
    if base == _RAW:
        packed.view(torch.int16).copy_(values)
    elif count:
        index = _BASES[base][0]
        threads = get_num_threads()
        if not _native.pack_digits(
            isa, threads, index, values.data_ptr(), count, packed.data_ptr()
        ):
            raise ValueError(
                f"a value is outside -{base // 2}..{base // 2}, the digits of base {base}"
            )
    return packed


def _add_digits_(isa: int, total: Tensor, packed: Tensor, base: int) -> None:
    count = total.numel()
    wide = total.dtype is torch.int32
    check_mutable(total, "the sum", torch.int32 if wide else torch.int16, (count,))
    packed = check_readable(
        packed, f"{count} values in base {base}", torch.uint8, (_width(count, base),)
    )
    if base == _RAW:
        # A piece of a message may start at an odd address.
        total.add_(packed.clone().view(torch.int16))
    elif count:
        threads = get_num_threads()
        _native.add_digits(
            isa, threads, _BASES[base][0], packed.data_ptr(), count, total.data_ptr(), wide
        )


def _weight_rows(weight: Tensor, shape: WeightShape, first: int, last: int) -> Tensor:
    """Rows ``first .. last - 1``: a view where they are whole strips, else a copy."""
    weight = check_packed(weight, shape)
    start, shift = divmod(first, BLOCK)
    strips = -(-(last - first) // BLOCK)
    if not shift and (last % BLOCK == 0 or last == shape.out_features):
        return weight[start : start + strips]
    rows = weight.view(torch.int32)
    if shift:
        below = rows[start + 1 : start + 1 + strips]
        if len(below) < strips:
            below = torch.cat([below, torch.full_like(rows[:1], _EMPTY_ROW)])
        rows = torch.cat([rows[start : start + strips, :, shift:], below[:, :, :shift]], dim=2)
    else:
        rows = rows[start : start + strips].clone()
    if beyond := (first - last) % BLOCK:
        rows[-1, :, BLOCK - beyond :] = _EMPTY_ROW
    return rows.view(torch.uint8)


def _flip_list(before: Tensor, after: Tensor, shape: WeightShape) -> tuple[Tensor, Tensor]:
    before = check_packed(before, shape)
    after = check_packed(after, shape)
    strips = before.shape[0]
    columns = shape.in_features
    threads = get_num_threads()
    first = torch.zeros(strips + 1, dtype=torch.int64)
    pair = before.data_ptr(), after.data_ptr()
    if before.numel():
        _native.count_flips(threads, *pair, strips, columns, first[1:].data_ptr())
        first = first.cumsum(0)
    count = int(first[-1])
    places = torch.empty(count, dtype=torch.int64)
    directions = torch.empty(count, dtype=torch.int8)
    if count:
        found = first.data_ptr(), places.data_ptr(), directions.data_ptr()
        _native.list_flips(threads, *pair, strips, columns, *found)
    return places, directions


def _apply_flips_(weight: Tensor, shape: WeightShape, places: Tensor, directions: Tensor) -> None:
    rows = shape.out_features
    columns = shape.in_features
    check_mutable(weight, "packed", torch.uint8, packed_shape(rows, columns))
    count = places.numel()
    places = check_readable(places, "places", torch.int64, (count,))
    directions = check_readable(directions, "directions", torch.int8, (count,))
    flips = places.data_ptr(), directions.data_ptr(), count
    outcome = _native.apply_flips(weight.data_ptr(), rows, columns, *flips)
    if outcome == 1:
        raise ValueError(f"a flip is outside a weight of {rows} x {columns}")
    if outcome == 2:
        raise ValueError("a flip leads outside -1..1: the replicas of this weight differ")
