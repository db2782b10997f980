"""Measure tile sizes on a GPU: the model's choice and those around it, on random operands."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from typing import Final

import torch
import triton
from attrs import evolve
from torch import Tensor

from arb_ternary.backends.protocol import WeightShape
from arb_ternary.backends.vote_state import VoteLimits, new_state
from arb_ternary_triton.arguments import packed_columns
from arb_ternary_triton.choice import forced
from arb_ternary_triton.entries import Entry, Kind, modelled
from arb_ternary_triton.gpu import Gpu
from arb_ternary_triton.tables import Bucket, UserTable

_DTYPES: Final = {
    "int8": torch.int8,
    "wide": torch.int8,
    "shifts": torch.int8,
    "float32": torch.float32,
}
#: Columns that share an exponent in the operands.
_GROUP: Final = 128

_log = logging.getLogger("arb_ternary.backends")


def candidates(kind: Kind, rows: int, gpu: Gpu) -> list[Entry]:
    """Return the model's choice, then entries that differ from it in one respect.

    They differ in the tile, in warps, in stages, or in how sums are shared.
    """
    first = modelled(kind, rows, gpu)
    kernel, operands = kind
    smallest = 8 if kernel == "row" else 32
    found = [
        first,
        evolve(first, warps=4),
        evolve(first, warps=8),
        evolve(first, stages=2),
        evolve(first, stages=3),
        evolve(first, stages=4),
        evolve(first, outputs=max(smallest, first.outputs // 2)),
        evolve(first, outputs=min(128, first.outputs * 2)),
        evolve(first, blocks=max(1, first.blocks // 2)),
        evolve(first, blocks=min(4, first.blocks * 2)),
        evolve(first, outputs=64, warps=4, stages=3),
    ]
    if kernel != "row":
        # int8 votes sum at least 32 rows at a time.
        least = 32 if kernel == "votes" and operands != "float32" else 16
        found.append(evolve(first, rows=max(least, first.rows // 2)))
        found.append(evolve(first, rows=min(128, first.rows * 2)))
    if kernel != "votes" and operands != "wide":
        fill = 2 * gpu.multiprocessors
        found += [evolve(first, fill=programs) for programs in (0, fill // 2, fill, 2 * fill)]
    return list(dict.fromkeys(found))


def best_of(entries: Iterable[Entry], milliseconds: Callable[[Entry], float]) -> Entry | None:
    """Return the fastest entry, or None if none can run.

    An entry that cannot run is skipped: it takes too much shared memory, or does not compile.

    Args:
        entries: in order of preference among equals.
        milliseconds: measures an entry.
    """
    best = None
    least = math.inf
    for entry in entries:
        try:
            taken = milliseconds(entry)
        except (RuntimeError, triton.TritonError) as error:
            _log.debug("tile %s cannot run: %s", entry, error)
            continue
        if taken < least:
            best = entry
            least = taken
    return best


def call_on(kind: Kind, bucket: Bucket, device: torch.device) -> Callable[[], object]:
    """Return a call of the kernel on operands of its own."""
    from arb_ternary_triton import casting, products

    kernel, operands = kind
    rows, outputs, columns = bucket
    dtype = _DTYPES.get(operands, torch.bfloat16)
    integer = dtype is torch.int8
    shape = WeightShape(outputs, columns, _GROUP)
    size = (outputs, packed_columns(columns))
    packed = torch.randint(0, 256, size, dtype=torch.uint8, device=device) & 0x55
    exponent = torch.full((outputs, shape.groups), -6, dtype=torch.int8, device=device)
    if operands == "wide":
        exponent[0, 0] = 4
        exponent[-1, -1] = 4
    x = _operand(rows, columns, dtype, device)
    if kernel in ("row", "linear"):
        scale = torch.ones(rows, device=device) if integer else None
        return lambda: products.linear(x, scale, packed, exponent, None, shape, torch.bfloat16)

    unit = torch.ones((), device=device) if integer else None
    grad = _operand(rows, outputs, dtype, device)
    if kernel == "grad_input":
        return lambda: products.linear_grad_input(
            grad, unit, packed, exponent, shape, torch.bfloat16
        )
    votes = torch.zeros((outputs, columns), dtype=torch.int8, device=device)
    state = new_state(shape, packed, exponent, votes, "triton")
    if operands != "shifts":
        return lambda: casting.cast_votes(grad, x, unit, state)

    magnitudes = torch.zeros_like(state.stats[1:])
    scaled = state._replace(
        magnitudes=magnitudes,
        vote_scale=torch.ones_like(magnitudes, dtype=torch.int32),
        limits=torch.tensor(VoteLimits(1024, 2)),
    )
    return lambda: casting.cast_scaled_votes(grad, x, unit, scaled)


def tune(
    kind: Kind, bucket: Bucket, gpu: Gpu, device: torch.device, table: UserTable
) -> Entry | None:
    """Measure a bucket and keep the result; return None if no candidate runs."""
    _log.info("triton: measuring %s, %s on %s x %s x %s", *kind, *bucket)
    with torch.no_grad(), torch.cuda.device(device):
        call = call_on(kind, bucket, device)

        def milliseconds(entry: Entry) -> float:
            """Return the fastest of many calls, each with a cold second-level cache."""
            with forced(entry):
                taken = triton.testing.do_bench(call, warmup=5, rep=20, return_mode="min")
            return float(taken)

        best = best_of(candidates(kind, bucket[0], gpu), milliseconds)
    return None if best is None else table.keep(kind, bucket, best)


def _operand(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    if dtype is torch.int8:
        return torch.randint(-127, 128, (rows, columns), dtype=dtype, device=device)
    return torch.randn(rows, columns, device=device).to(dtype)
