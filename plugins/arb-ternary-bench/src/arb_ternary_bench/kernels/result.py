"""The result of the kernel bench as a table."""

from __future__ import annotations

from collections.abc import Iterator

from arb_ternary_bench.machine import describe
from arb_ternary_bench.table import Column, Record, ResultTable, number, percent, ratio


def _records(result: Record) -> Iterator[Record]:
    """Yield every contender of every cell, then the limits that were measured with them."""
    for cell in result["cells"]:
        for row in cell["rows"]:
            yield {**cell, **row}
        yield {
            **cell,
            "contender": "limit: read, int8",
            "bytes_per_second": cell["read_bandwidth"],
            "operations_per_second": cell["int8_peak"],
        }
        if cell["bfloat16_peak"] is not None:
            yield {
                **cell,
                "contender": "limit: bf16",
                "operations_per_second": cell["bfloat16_peak"],
            }


def _shape(row: Record) -> str:
    return f"{row['out_features']} x {row['in_features']}"


def _group(row: Record) -> str:
    return "row" if row["group_size"] >= row["in_features"] else str(row["group_size"])


def _of_read(row: Record) -> str:
    # What comes from the cache is not measured against the rate of memory.
    return percent(row.get("of_read_bandwidth")) if row["cache"] == "cold" else ""


def _of_peak(row: Record, share: str) -> str:
    # Ops without multiplications have no rate.
    return percent(row.get(share)) if row["operations_per_second"] else ""


def _speedup(title: str, baseline: str) -> Column:
    return Column(title, lambda row: ratio(row.get("speedup", {}).get(baseline)))


def notes(result: Record) -> list[str]:
    """Return what a reader of the table has to know."""
    machine = result["machine"]
    probes = result["probes"]
    cold = "calls rotate among copies of twice the last-level cache"
    lines = []
    # Older results have no entry for a GPU.
    gpu = machine.get("gpu")
    if gpu is not None:
        cold = "before every call twice the second-level cache is written"
        software = f"ROCm {gpu['hip']}" if gpu["hip"] else f"CUDA {gpu['cuda']}"
        lines.append(
            f"{gpu['name']}, {gpu['multiprocessors']} multiprocessors, {software}; times are those "
            "between two events."
        )
    lines.append(describe(machine))
    lines.append(
        "Least and median time per call; rates and ratios (x: how many times as fast as that) are "
        f"of least times. hot: one copy of the weight. cold: {cold}, "
        f"{result['cache_bytes'] >> 20} MiB."
    )
    limits = f"Read bandwidth: {probes['read_bandwidth']}. int8 peak: {probes['int8_peak']}."
    if probes.get("bfloat16_peak"):
        limits += f" bfloat16 peak: {probes['bfloat16_peak']}."
    return [*lines, limits, *_remarks(result), *_left_out(result)]


def _remarks(result: Record) -> list[str]:
    """Return the notes on contenders, each once."""
    found: set[str] = set()
    for cell in result["cells"]:
        found.update(f"{row['contender']}: {row['note']}." for row in cell["rows"] if row["note"])
    return sorted(found)


def _left_out(result: Record) -> list[str]:
    """Return who did not take part, and why."""
    found: set[str] = set()
    for cell in result["cells"]:
        where = f"left out of {cell['op']} {_shape(cell)}"
        found.update(f"{each['name']} {where}: {each['reason']}." for each in cell["excluded"])
    lines = sorted(found)
    for peer in result["peers"]:
        if not peer["available"]:
            lines.append(
                f"Peer {peer['name']} is not installed: {peer['reason']}. Install: "
                f"{peer['install']}"
            )
    return lines


TABLE = ResultTable(
    columns=(
        Column("op", lambda row: row["op"], left=True),
        Column("N x K", _shape, left=True),
        Column("group", _group, left=True),
        Column("M", lambda row: str(row["rows_m"]), left=True),
        Column("cache", lambda row: row["cache"], left=True),
        Column("what", lambda row: row["contender"], left=True),
        Column("min us", lambda row: number(row.get("seconds_min"), 1, 1e6)),
        Column("median us", lambda row: number(row.get("seconds_median"), 1, 1e6)),
        Column("GB/s", lambda row: number(row.get("bytes_per_second"), 1, 1e-9)),
        Column("of read", _of_read),
        Column("GOP/s", lambda row: number(row["operations_per_second"] or None, 0, 1e-9)),
        Column("of int8 peak", lambda row: _of_peak(row, "of_int8_peak")),
        Column("of bf16 peak", lambda row: _of_peak(row, "of_bfloat16_peak")),
        _speedup("x bf16", "torch_bfloat16"),
        _speedup("x int8", "torch_int8"),
        _speedup("x AdamW", "torch_adamw"),
        _speedup("x peer", "best_peer"),
    ),
    records=_records,
    notes=notes,
)
