"""The figures of a cell as plain numbers: rates, shares of the machine's limits, ratios."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from arb_ternary_bench.kernels.cells import Cell, Contender
from arb_ternary_bench.kernels.probes import Limits
from arb_ternary_bench.kernels.timing import Timing

#: Roles that a row is compared with, by the key of the ratio. The fastest of a role is taken.
BASELINES: Final[Mapping[str, str]] = {
    "torch_bfloat16": "torch bfloat16",
    "torch_int8": "torch int8",
    "torch_adamw": "torch AdamW",
    "best_peer": "peer",
}

Timings = Mapping[str, Timing]


def cell_record(
    cell: Cell,
    contenders: Sequence[Contender],
    excluded: Sequence[Mapping[str, str]],
    timings: Timings,
    limits: Limits,
) -> dict[str, Any]:
    """Return one cell of the result; what was not measured is None.

    A ratio is the baseline's time over the row's, of least times and of medians: 2 is twice as
    fast.
    """
    reading = limits.reading.variant
    int8 = limits.int8.variant
    read = timings[reading.name]
    peak = timings[int8.name]
    bfloat16_peak = None
    bfloat16_median = None
    if limits.bfloat16 is not None:
        bfloat16 = limits.bfloat16.variant
        bfloat16_peak = bfloat16.operations / timings[bfloat16.name].least
        bfloat16_median = bfloat16.operations / timings[bfloat16.name].median
    baselines = {key: _fastest(contenders, timings, role) for key, role in BASELINES.items()}
    record = {
        "op": cell.op,
        "out_features": cell.out_features,
        "in_features": cell.in_features,
        "group_size": cell.group_size,
        "rows_m": cell.rows,
        "cache": "cold" if cell.cold else "hot",
        "read_bandwidth": reading.nbytes / read.least,
        "read_bandwidth_median": reading.nbytes / read.median,
        "int8_peak": int8.operations / peak.least,
        "int8_peak_median": int8.operations / peak.median,
        "bfloat16_peak": bfloat16_peak,
        "bfloat16_peak_median": bfloat16_median,
        "baselines": {key: found and found.variant.name for key, found in baselines.items()},
        "excluded": [dict(each) for each in excluded],
    }
    rows = [_row(contender, timings, record, baselines) for contender in contenders]
    return {**record, "rows": rows}


def _fastest(contenders: Sequence[Contender], timings: Timings, role: str) -> Contender | None:
    found = [contender for contender in contenders if contender.role == role]
    return min(found, key=lambda contender: timings[contender.variant.name].least, default=None)


def _row(
    contender: Contender,
    timings: Timings,
    limits: Mapping[str, Any],
    baselines: Mapping[str, Contender | None],
) -> dict[str, Any]:
    variant = contender.variant
    timing = timings[variant.name]
    moved = variant.nbytes / timing.least
    computed = variant.operations / timing.least
    bfloat16_peak = limits["bfloat16_peak"]
    speedup: dict[str, float | None] = {}
    speedup_median: dict[str, float | None] = {}
    for key, baseline in baselines.items():
        speedup[key] = None
        speedup_median[key] = None
        if baseline is not None:
            theirs = timings[baseline.variant.name]
            speedup[key] = theirs.least / timing.least
            speedup_median[key] = theirs.median / timing.median
    return {
        "contender": variant.name,
        "role": contender.role,
        "name": contender.name,
        "note": contender.note,
        "checked": contender.checked,
        "seconds_min": timing.least,
        "seconds_median": timing.median,
        "calls": timing.calls,
        "copies": variant.copies,
        "rotated_bytes": variant.copies * variant.rotated_bytes,
        "bytes": variant.nbytes,
        "operations": variant.operations,
        "bytes_per_second": moved,
        "operations_per_second": computed,
        "of_read_bandwidth": moved / limits["read_bandwidth"],
        "of_int8_peak": computed / limits["int8_peak"],
        "of_bfloat16_peak": None if bfloat16_peak is None else computed / bfloat16_peak,
        "speedup": speedup,
        "speedup_median": speedup_median,
    }
