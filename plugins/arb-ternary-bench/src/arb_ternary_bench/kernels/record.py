"""The figures of a cell as plain numbers: rates, shares of the machine's limits, ratios."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from arb_ternary_bench.kernels.cells import Cell, Contender
from arb_ternary_bench.kernels.timing import Timing, Variant

# : What a row is compared with, by the key of the ratio. Of several contenders of a role the
# fastest is taken.
BASELINES: Final[Mapping[str, str]] = {
    "torch_bfloat16": "torch bfloat16",
    "torch_int8": "torch int8",
    "torch_adamw": "torch AdamW",
    "best_peer": "peer",
}


def cell_record(
    cell: Cell,
    contenders: Sequence[Contender],
    excluded: Sequence[Mapping[str, str]],
    timings: Mapping[str, Timing],
    reading: Variant,
    peak: Variant,
    float_peak: Variant | None = None,
) -> dict[str, Any]:
    """One cell of the result; what was not measured is None: the peak in bfloat16 is measured on
    GPUs only.

    Every ratio is the baseline's time over the row's, of least times and of medians: 2 is twice as
    fast.
    """
    bandwidth = reading.nbytes / timings[reading.name].least
    int8_peak = peak.operations / timings[peak.name].least
    floats = None if float_peak is None else float_peak.operations / timings[float_peak.name].least
    float_median = (
        None if float_peak is None else float_peak.operations / timings[float_peak.name].median
    )
    baselines = {key: _fastest(contenders, timings, role) for key, role in BASELINES.items()}
    return {
        "op": cell.op,
        "out_features": cell.out_features,
        "in_features": cell.in_features,
        "group_size": cell.group_size,
        "rows_m": cell.rows,
        "cache": "cold" if cell.cold else "hot",
        "read_bandwidth": bandwidth,
        "read_bandwidth_median": reading.nbytes / timings[reading.name].median,
        "int8_peak": int8_peak,
        "int8_peak_median": peak.operations / timings[peak.name].median,
        "bfloat16_peak": floats,
        "bfloat16_peak_median": float_median,
        "baselines": {key: found and found.variant.name for key, found in baselines.items()},
        "excluded": [dict(each) for each in excluded],
        "rows": [
            _row(contender, timings, bandwidth, int8_peak, floats, baselines)
            for contender in contenders
        ],
    }


def _fastest(
    contenders: Sequence[Contender], timings: Mapping[str, Timing], role: str
) -> Contender | None:
    found = [contender for contender in contenders if contender.role == role]
    return min(found, key=lambda contender: timings[contender.variant.name].least, default=None)


def _row(
    contender: Contender,
    timings: Mapping[str, Timing],
    bandwidth: float,
    int8_peak: float,
    float_peak: float | None,
    baselines: Mapping[str, Contender | None],
) -> dict[str, Any]:
    variant = contender.variant
    timing = timings[contender.variant.name]
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
        "bytes_per_second": variant.nbytes / timing.least,
        "operations_per_second": variant.operations / timing.least,
        "of_read_bandwidth": variant.nbytes / timing.least / bandwidth,
        "of_int8_peak": variant.operations / timing.least / int8_peak,
        "of_bfloat16_peak": None
        if float_peak is None
        else variant.operations / timing.least / float_peak,
        "speedup": {
            key: found and timings[found.variant.name].least / timing.least
            for key, found in baselines.items()
        },
        "speedup_median": {
            key: found and timings[found.variant.name].median / timing.median
            for key, found in baselines.items()
        },
    }
