"""The measurement of a cell: contenders are checked, then timed in turns with the limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from _kernels.cells import Contender
from _kernels.gpu import SPACING, gpu_clock
from _kernels.limits import INT8, READ, Limit
from _kernels.operands import Operands
from _kernels.ops import OPS
from _kernels.peers import peers
from arb_ternary.errors import ArbError
from harness.timing import Clock, Timing, measure, processor_clock

#: Roles that a row is compared with. The fastest of a role is taken.
_BASELINES: Final = ("torch_bfloat16", "torch_int8", "torch_adamw", "peer")


def measure_cell(
    operands: Operands, backends: Sequence[str], limits: Sequence[Limit], seconds: float
) -> dict[str, Any]:
    """Measure a cell; return its record, in which a ratio of 2 is twice as fast.

    Args:
        operands: of the cell.
        backends: that take part.
        limits: that are measured among the contenders.
        seconds: about how long each contender is timed.

    Raises:
        ArbError: a backend's kernel gives a wrong result.
    """
    cell = operands.cell
    contenders, excluded = _contenders(operands, backends)
    clock: Clock = processor_clock
    spacing = 0.0
    if cell.device != "cpu":
        clock = gpu_clock(cell.device, cold=cell.cold, cache_bytes=cell.cache_bytes)
        spacing = SPACING
    variants = [*contenders, *(limit.variant for limit in limits)]
    timings = measure(variants, seconds, clock, spacing=spacing)
    rates = {limit.variant.name: limit.rate(timings) for limit in limits}
    baselines = {}
    for role in _BASELINES:
        times = [timings[each.name].least for each in contenders if each.role == role]
        baselines[role] = min(times, default=None)
    return {
        "op": cell.op,
        "out_features": cell.out_features,
        "in_features": cell.in_features,
        "rows_m": cell.rows,
        "cache": "cold" if cell.cold else "hot",
        "read_bandwidth": rates[READ],
        "int8_peak": rates[INT8],
        "rows": [_row(each, timings[each.name], rates, baselines) for each in contenders],
        "excluded": excluded,
    }


def _contenders(operands: Operands, backends: Sequence[str]) -> tuple[list[Contender], list[str]]:
    """Return who takes part, each checked, and who cannot, with reasons."""
    op = operands.cell.op
    found = OPS[op](operands, backends)
    excluded: list[str] = []
    if op == "linear":
        others, excluded = peers(operands)
        found += others
    taking_part = []
    for contender in found:
        try:
            contender.check()
        except (ArbError, RuntimeError) as error:
            # torch's int8 product refuses shapes on a GPU with a RuntimeError.
            if contender.role == "backend":
                raise
            excluded.append(f"{contender.name}: {str(error).splitlines()[0]}")
        else:
            taking_part.append(contender)
    return taking_part, excluded


def _row(
    contender: Contender,
    timing: Timing,
    rates: Mapping[str, float],
    baselines: Mapping[str, float | None],
) -> dict[str, Any]:
    moved = contender.nbytes / timing.least
    computed = contender.operations / timing.least
    return {
        "contender": contender.name,
        "role": contender.role,
        "seconds_min": timing.least,
        "seconds_median": timing.median,
        "bytes_per_second": moved,
        "operations_per_second": computed,
        "of_read_bandwidth": moved / rates[READ],
        "of_int8_peak": computed / rates[INT8],
        "speedup": {role: time and time / timing.least for role, time in baselines.items()},
    }
