"""Time the kernels of backends, in turns with torch's, with peers and with the machine's limits.

The limits are what the machine can do: the rate of reading memory, and the peak of its units. Every
kernel is first checked against the torch backend, with outputs that held NaN. On a CPU, llama.cpp's
ternary products take part where xllamacpp and gguf are installed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import click
import torch

from _kernels.cells import Cell
from _kernels.gpu import check_device, gpu_name
from _kernels.limits import cache_size, limits_of
from _kernels.operands import Operands
from _kernels.ops import OPS
from _kernels.run import measure_cell
from arb_ternary.cli.options import as_json
from harness import script
from harness.machine import describe, load_average, machine_facts, with_threads
from harness.table import Column, Record, ResultTable, number, percent, ratio


def _of_read(row: Record) -> str:
    # What comes from the cache is not measured against the rate of memory.
    return percent(row["of_read_bandwidth"]) if row["cache"] == "cold" else ""


def _of_peak(row: Record) -> str:
    # Ops without multiplications have no rate.
    return percent(row["of_int8_peak"]) if row["operations_per_second"] else ""


def _speedup(title: str, baseline: str) -> Column:
    return Column(title, lambda row: ratio(row["speedup"][baseline]))


def notes(result: Record) -> list[str]:
    """Return what a reader of the table has to know."""
    machine = result["machine"]
    cold = "calls rotate among copies of twice the last-level cache"
    lines = []
    gpu = machine.get("gpu")
    if gpu is not None:
        cold = "before every call twice the second-level cache is written"
        lines.append(f"{gpu}; times are those between two events.")
    lines.append(describe(machine))
    lines.append(
        "Least and median time per call; rates and ratios (x: how many times as fast as that) are "
        f"of least times. hot: one copy of the weight. cold: {cold}, "
        f"{result['cache_bytes'] >> 20} MiB."
    )
    for name, how in result["probes"].items():
        if how:
            lines.append(f"{name.replace('_', ' ')}: {how}.")
    remarks: set[str] = set()
    for cell in result["cells"]:
        for each in cell["excluded"]:
            remarks.add(f"Left out of {cell['op']}: {each}.")
    return [*lines, *sorted(remarks)]


TABLE = ResultTable(
    columns=(
        Column("op", lambda row: row["op"], left=True),
        Column("N x K", lambda row: f"{row['out_features']} x {row['in_features']}", left=True),
        Column("M", lambda row: str(row["rows_m"]), left=True),
        Column("cache", lambda row: row["cache"], left=True),
        Column("what", lambda row: row["contender"], left=True),
        Column("min us", lambda row: number(row["seconds_min"], 1, 1e6)),
        Column("median us", lambda row: number(row["seconds_median"], 1, 1e6)),
        Column("GB/s", lambda row: number(row["bytes_per_second"], 1, 1e-9)),
        Column("of read", _of_read),
        Column("GOP/s", lambda row: number(row["operations_per_second"] or None, 0, 1e-9)),
        Column("of int8 peak", _of_peak),
        _speedup("x bf16", "torch_bfloat16"),
        _speedup("x int8", "torch_int8"),
        _speedup("x AdamW", "torch_adamw"),
        _speedup("x peer", "peer"),
    ),
    records=lambda result: [{**cell, **row} for cell in result["cells"] for row in cell["rows"]],
    notes=notes,
)


def _shape(text: str) -> tuple[int, int]:
    outputs, inputs = map(script.count, text.split("x"))
    return outputs, inputs


def _op(text: str) -> str:
    if text not in OPS:
        raise ValueError(text)
    return text


def cells_of(
    ops: Sequence[str],
    shapes: Sequence[tuple[int, int]],
    rows: Sequence[int],
    device: str,
    cache_bytes: int,
) -> Iterator[Cell]:
    """Yield all cells, in the order of the table."""
    for op, (out_features, in_features) in product(ops, shapes):
        rows_of_op = (1,) if op == "apply_scaled_votes" else rows
        for count, cold in product(rows_of_op, (False, True)):
            yield Cell(
                op=op,
                rows=count,
                out_features=out_features,
                in_features=in_features,
                cold=cold,
                cache_bytes=cache_bytes,
                device=device,
            )


@click.command(help=__doc__)
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:N.")
@script.comma_list("--backends", "", str, "Backends; default: all that the device can use.")
@script.comma_list(
    "--shapes",
    "4096x4096,11008x4096,4096x11008,2560x2560,1024x1024,512x512,256x256",
    _shape,
    "Shapes of weights, outputs by inputs.",
)
@script.comma_list("--m", "1,4,16,64,256,512,2048", script.count, "Rows of activations.")
@script.comma_list("--ops", ",".join(OPS), _op, f"Of {', '.join(OPS)}.")
@script.threads
@script.seconds(0.5, "Seconds for each contender of a cell.")
@script.out
@as_json
def main(
    device: str,
    backends: tuple[str, ...],
    shapes: tuple[tuple[int, int], ...],
    m: tuple[int, ...],
    ops: tuple[str, ...],
    threads: int | None,
    seconds: float,
    out: Path | None,
    as_json: bool,
) -> None:
    """Measure and show."""
    check_device(device)
    names = backends or script.usable_backends(device)
    cache_bytes = cache_size(device)
    cells: list[dict[str, Any]] = []
    with with_threads(threads), torch.no_grad():
        facts = {**machine_facts(), "gpu": gpu_name(device)}
        limits = limits_of(device, names, cache_bytes)
        for cell in cells_of(ops, shapes, m, device, cache_bytes):
            operands = Operands(cell, seed=len(cells))
            cells.append(measure_cell(operands, names, limits, seconds))
            script.say(cell.title)
    result = {
        "machine": {**facts, "load_average_at_end": load_average()},
        "cache_bytes": cache_bytes,
        "probes": {limit.variant.name: limit.how for limit in limits},
        "cells": cells,
    }
    script.finish(result, TABLE, out, as_json=as_json)


if __name__ == "__main__":
    script.main(main)
