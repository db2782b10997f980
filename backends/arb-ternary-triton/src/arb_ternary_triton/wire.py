"""What travels between ranks: votes as digits of bytes, and lists of trits that have moved; what
sums are worth.

Meaning and signatures are those of ``arb_ternary_distributed`` and ``arb_ternary_votes.levels``,
which look for these kernels by name.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from arb_ternary.backends.protocol import WeightShape
from arb_ternary.counters.hashing import hash_key, signed
from arb_ternary_triton.arguments import check_mutable, check_packed, check_readable, packed_columns
from arb_ternary_triton.kernels.wire import (
    add_digits_kernel,
    apply_flips_kernel,
    check_flips_kernel,
    count_flips_kernel,
    list_flips_kernel,
    pack_digits_kernel,
    quanta_kernel,
)
from arb_ternary_triton.launch import INTERPRETED, cdiv, launch, power_of_two_up
from arb_ternary_triton.tiles import elementwise

#: Digits that a byte holds, by base; base 65535 stands for int16 as it is.
_DIGITS: Final = {3: 5, 5: 3, 15: 2, 255: 1}
_RAW: Final = 65535


def _width(count: int, base: int) -> int:
    if base == _RAW:
        return 2 * count
    if base not in _DIGITS:
        raise ValueError(f"base must be one of {[*_DIGITS, _RAW]}, got {base}")
    return cdiv(count, _DIGITS[base])


def _chunk(count: int) -> int:
    """Elements of a program."""
    return min(power_of_two_up(count), 1 << 16) if INTERPRETED else 1024


def _require(condition: Tensor, message: str) -> None:
    """ValueError unless the bool scalar is true; on a GPU an assertion there, for which nobody
    waits.
    """
    if not condition.is_cpu:
        torch._assert_async(condition, message)
    elif not condition:
        raise ValueError(message)


def digits_to_bytes(values: Tensor, base: int) -> Tensor:
    """int16 ``[n]`` to digits; on a GPU a value that has none is an assertion of the device."""
    count = values.numel()
    width = _width(values.numel(), base)
    values = check_readable(values, "values", torch.int16, (count,))
    packed = torch.empty(width, dtype=torch.uint8, device=values.device)
    if base == _RAW:
        packed.view(torch.int16).copy_(values)
        return packed
    if count:
        (low, high) = values.aminmax()
        half = base // 2
        _require(
            (low >= -half) & (high <= half),
            f"a value is outside {-half}..{half}, the digits of base {base}",
        )
    chunk = _chunk(width)
    constants = {"BASE": base, "DIGITS": _DIGITS[base], "CHUNK": chunk}
    launch(pack_digits_kernel, (cdiv(width, chunk),), values, packed, count, width, **constants)
    return packed


def bytes_to_digits(packed: Tensor, count: int, base: int) -> Tensor:
    """Digits to int16 ``[count]``."""
    values = torch.zeros(count, dtype=torch.int16, device=packed.device)
    add_digits_(values, packed, base)
    return values


def add_digits_(total: Tensor, packed: Tensor, base: int) -> None:
    """Add digits to int16 or int32 ``[n]``, in place."""
    count = total.numel()
    width = _width(total.numel(), base)
    check_mutable(
        total, "the sum", torch.int32 if total.dtype is torch.int32 else torch.int16, (count,)
    )
    packed = check_readable(packed, f"{count} values in base {base}", torch.uint8, (width,))
    if base == _RAW:
        # A piece of a message may start at an odd address.
        total.add_(packed.clone().view(torch.int16))
        return
    chunk = _chunk(width)
    constants = {"BASE": base, "DIGITS": _DIGITS[base], "CHUNK": chunk}
    launch(add_digits_kernel, (cdiv(width, chunk),), packed, total, count, width, **constants)


def weight_rows(weight: Tensor, shape: WeightShape, first: int, last: int) -> Tensor:
    """Rows ``first .. last - 1`` of a packed weight: a view."""
    return check_packed(weight, shape)[first:last]


def flip_list(before: Tensor, after: Tensor, shape: WeightShape) -> tuple[Tensor, Tensor]:
    """Places (int64, ascending) and directions (int8) of the trits that differ; the host waits for
    their number.
    """
    before = check_packed(before, shape)
    after = check_packed(after, shape)
    rows = shape.out_features
    columns = shape.in_features
    tile = elementwise(rows, columns)
    tiles = cdiv(columns, tile.columns)
    grid = (cdiv(rows, tile.rows), tiles)
    counts = torch.zeros((rows, tiles), dtype=torch.int64, device=before.device)
    constants = {"ROWS": tile.rows, "COLUMNS": tile.columns}
    launch(
        count_flips_kernel, grid, before, after, counts, rows, before.shape[1], tiles, **constants
    )
    ends = counts.view(-1).cumsum(0)
    count = int(ends[-1]) if ends.numel() else 0
    places = torch.empty(count, dtype=torch.int64, device=before.device)
    directions = torch.empty(count, dtype=torch.int8, device=before.device)
    operands = before, after, ends, places, directions
    launch(list_flips_kernel, grid, *operands, rows, columns, before.shape[1], tiles, **constants)
    return places, directions


def apply_flips_(weight: Tensor, shape: WeightShape, places: Tensor, directions: Tensor) -> None:
    """Move trits at distinct places; on a GPU a flip that leads nowhere is an assertion of the
    device.
    """
    rows = shape.out_features
    columns = shape.in_features
    count = places.numel()
    check_mutable(weight, "packed", torch.uint8, (rows, packed_columns(columns)))
    places = check_readable(places, "places", torch.int64, (count,))
    directions = check_readable(directions, "directions", torch.int8, (count,))
    words = weight.view(torch.int32)
    faults = torch.zeros(2, dtype=torch.int32, device=weight.device)
    chunk = _chunk(count)
    grid = (cdiv(count, chunk),)
    operands = words, places, directions
    launch(
        check_flips_kernel,
        grid,
        *operands,
        faults,
        count,
        rows,
        columns,
        weight.shape[1],
        CHUNK=chunk,
    )
    _require(faults[0] == 0, f"a flip is outside a weight of {rows} x {columns}")
    _require(faults[1] == 0, "a flip leads outside -1..1: the replicas of this weight differ")
    launch(apply_flips_kernel, grid, *operands, count, columns, weight.shape[1], CHUNK=chunk)


def sums_to_quanta(
    sums: Tensor, whole: int, fraction: int, words: tuple[int, int, int], start: int
) -> Tensor:
    """Sums of votes in whole quanta, int32: of at most 2**32, whose first has the index ``start``
    in the hash.
    """
    sums = check_readable(sums, "sums", (torch.int16, torch.int32), tuple(sums.shape))
    quanta = torch.empty(sums.shape, dtype=torch.int32, device=sums.device)
    count = sums.numel()
    if count > 1 << 32:
        raise ValueError(f"the triton backend takes up to {1 << 32} sums, got {count}")
    keys = (signed(hash_key(*words, (start >> 32) + block)) for block in (0, 1))
    chunk = _chunk(count)
    launch(
        quanta_kernel,
        (cdiv(count, chunk),),
        sums,
        quanta,
        count,
        whole,
        fraction,
        signed(start),
        *keys,
        CHUNK=chunk,
    )
    return quanta
