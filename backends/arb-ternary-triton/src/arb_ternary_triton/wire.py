"""Messages between ranks: votes as digits in bytes, lists of flipped trits.

Also convert sums of votes to quanta.

Meaning and signatures are those of ``arb_ternary_distributed`` and ``arb_ternary_votes.levels``,
which look these kernels up by name.
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

#: Digits that a byte holds, by base. Base 65535 stands for int16 as it is.
_DIGITS: Final = {3: 5, 5: 3, 15: 2, 255: 1}
_RAW: Final = 65535


def _width(count: int, base: int) -> int:
    """Return the bytes of ``count`` digits."""
    if base == _RAW:
        return 2 * count
    if base not in _DIGITS:
        raise ValueError(f"base must be one of {[*_DIGITS, _RAW]}, got {base}")
    return cdiv(count, _DIGITS[base])


def _chunk(count: int) -> int:
    """Return the elements per program."""
    return min(power_of_two_up(count), 1 << 16) if INTERPRETED else 1024


def _require(condition: Tensor, message: str) -> None:
    """Raise ValueError unless the bool scalar is true.

    On a GPU it is a device-side assertion, which the host does not wait for.
    """
    if not condition.is_cpu:
        torch._assert_async(condition, message)
    elif not condition:
        raise ValueError(message)


def digits_to_bytes(values: Tensor, base: int) -> Tensor:
    """Pack int16 ``[n]`` into digits.

    Raises:
        ValueError: a value is not a digit of the base. On a GPU it is a device-side assertion.
    """
    count = values.numel()
    width = _width(count, base)
    values = check_readable(values, "values", torch.int16, (count,))
    packed = torch.empty(width, dtype=torch.uint8, device=values.device)
    if base == _RAW:
        packed.view(torch.int16).copy_(values)
        return packed
    if count:
        low, high = values.aminmax()
        half = base // 2
        _require(
            (low >= -half) & (high <= half),
            f"a value is outside {-half}..{half}, the digits of base {base}",
        )
    chunk = _chunk(width)
    launch(
        pack_digits_kernel,
        (cdiv(width, chunk),),
        values,
        packed,
        count,
        width,
        BASE=base,
        DIGITS=_DIGITS[base],
        CHUNK=chunk,
    )
    return packed


def add_digits_(total: Tensor, packed: Tensor, base: int) -> None:
    """Add digits to int16 or int32 ``[n]``, in place."""
    count = total.numel()
    width = _width(count, base)
    dtype = torch.int32 if total.dtype is torch.int32 else torch.int16
    check_mutable(total, "the sum", dtype, (count,))
    packed = check_readable(packed, f"{count} values in base {base}", torch.uint8, (width,))
    if base == _RAW:
        # A piece of a message may start at an odd address.
        total.add_(packed.clone().view(torch.int16))
        return
    chunk = _chunk(width)
    launch(
        add_digits_kernel,
        (cdiv(width, chunk),),
        packed,
        total,
        count,
        width,
        BASE=base,
        DIGITS=_DIGITS[base],
        CHUNK=chunk,
    )


def weight_rows(weight: Tensor, shape: WeightShape, first: int, last: int) -> Tensor:
    """Return rows ``first .. last - 1`` of a packed weight, as a view."""
    return check_packed(weight, shape)[first:last]


def flip_list(before: Tensor, after: Tensor, shape: WeightShape) -> tuple[Tensor, Tensor]:
    """Return places (int64, ascending) and directions (int8) of the trits that differ.

    The host waits for their number.
    """
    before = check_packed(before, shape)
    after = check_packed(after, shape)
    rows = shape.out_features
    columns = shape.in_features
    row_bytes = before.shape[1]
    tile = elementwise(rows, columns)
    tiles = cdiv(columns, tile.columns)
    grid = (cdiv(rows, tile.rows), tiles)
    counts = torch.zeros((rows, tiles), dtype=torch.int64, device=before.device)
    launch(
        count_flips_kernel,
        grid,
        before,
        after,
        counts,
        rows,
        row_bytes,
        tiles,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
    )
    ends = counts.view(-1).cumsum(0)
    count = int(ends[-1]) if ends.numel() else 0
    places = torch.empty(count, dtype=torch.int64, device=before.device)
    directions = torch.empty(count, dtype=torch.int8, device=before.device)
    launch(
        list_flips_kernel,
        grid,
        before,
        after,
        ends,
        places,
        directions,
        rows,
        columns,
        row_bytes,
        tiles,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
    )
    return places, directions


def apply_flips_(weight: Tensor, shape: WeightShape, places: Tensor, directions: Tensor) -> None:
    """Move the trits at distinct places.

    Raises:
        ValueError: a flip is outside the weight or leads outside -1..1. On a GPU it is a
            device-side assertion.
    """
    rows = shape.out_features
    columns = shape.in_features
    count = places.numel()
    row_bytes = packed_columns(columns)
    check_mutable(weight, "packed", torch.uint8, (rows, row_bytes))
    places = check_readable(places, "places", torch.int64, (count,))
    directions = check_readable(directions, "directions", torch.int8, (count,))
    words = weight.view(torch.int32)
    faults = torch.zeros(2, dtype=torch.int32, device=weight.device)
    chunk = _chunk(count)
    grid = (cdiv(count, chunk),)
    launch(
        check_flips_kernel,
        grid,
        words,
        places,
        directions,
        faults,
        count,
        rows,
        columns,
        row_bytes,
        CHUNK=chunk,
    )
    _require(faults[0] == 0, f"a flip is outside a weight of {rows} x {columns}")
    _require(faults[1] == 0, "a flip leads outside -1..1: the replicas of this weight differ")
    launch(
        apply_flips_kernel,
        grid,
        words,
        places,
        directions,
        count,
        columns,
        row_bytes,
        CHUNK=chunk,
    )


def sums_to_quanta(
    sums: Tensor, whole: int, fraction: int, words: tuple[int, int, int], start: int
) -> Tensor:
    """Convert at most 2**32 sums of votes to whole quanta, int32.

    ``start`` is the hash index of the first sum.
    """
    sums = check_readable(sums, "sums", (torch.int16, torch.int32), tuple(sums.shape))
    quanta = torch.empty(sums.shape, dtype=torch.int32, device=sums.device)
    count = sums.numel()
    if count > 1 << 32:
        raise ValueError(f"the triton backend takes up to {1 << 32} sums, got {count}")
    seed, step, stream = words
    block = start >> 32
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
        signed(hash_key(seed, step, stream, block)),
        signed(hash_key(seed, step, stream, block + 1)),
        CHUNK=chunk,
    )
    return quanta
