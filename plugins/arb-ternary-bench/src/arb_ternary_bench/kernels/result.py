"""The result of the kernel bench as a table, on the terminal and in Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

COLUMNS: Final = (
    "op",
    "N x K",
    "group",
    "M",
    "cache",
    "what",
    "min us",
    "median us",
    "GB/s",
    "of read",
    "GOP/s",
    "of int8 peak",
    "of bf16 peak",
    "x bf16",
    "x int8",
    "x AdamW",
    "x peer",
)
_RATIOS: Final = ("torch_bfloat16", "torch_int8", "torch_adamw", "best_peer")


def rows(result: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """The table's rows: every contender of every cell, then the limits that were measured beside
    them.
    """
    for cell in result["cells"]:
        where = (
            cell["op"],
            f"{cell['out_features']} x {cell['in_features']}",
            "row" if cell["group_size"] >= cell["in_features"] else str(cell["group_size"]),
            str(cell["rows_m"]),
            cell["cache"],
        )
        for row in cell["rows"]:
            yield (*where, *_cells(row, cell["cache"] == "cold"))
        limits = (
            "limit: read, int8",
            "",
            "",
            f"{cell['read_bandwidth'] / 1e9:.1f}",
            "",
            f"{cell['int8_peak'] / 1e9:,.0f}",
            *("",) * 6,
        )
        yield (*where, *limits)
        if cell["bfloat16_peak"] is not None:
            yield (
                *where,
                "limit: bf16",
                *("",) * 4,
                f"{cell['bfloat16_peak'] / 1e9:,.0f}",
                *("",) * 6,
            )


def _cells(row: Mapping[str, Any], cold: bool) -> tuple[str, ...]:
    rate = row["operations_per_second"]
    return (
        row["contender"],
        f"{row['seconds_min'] * 1e6:,.1f}",
        f"{row['seconds_median'] * 1e6:,.1f}",
        f"{row['bytes_per_second'] / 1e9:.1f}",
        # What comes from the cache is not held against the rate of memory.
        f"{row['of_read_bandwidth']:.0%}" if cold else "",
        f"{rate / 1e9:,.0f}" if rate else "",
        f"{row['of_int8_peak']:.0%}" if rate else "",
        f"{row['of_bfloat16_peak']:.0%}"
        if rate and row.get("of_bfloat16_peak") is not None
        else "",
        *(_ratio(row["speedup"][key]) for key in _RATIOS),
    )


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def notes(result: Mapping[str, Any]) -> list[str]:
    """What a reader of the table has to know."""
    machine = result["machine"]
    probes = result["probes"]
    cold = "calls rotate among copies of twice the last-level cache"
    lines = []
    # Results of before there were GPUs in them have no such entries.
    gpu = machine.get("gpu")
    bfloat16_peak = probes.get("bfloat16_peak")
    if gpu is not None:
        cold = "before every call twice the second-level cache is written"
        lines.append(
            f"{gpu['name']}, {gpu['multiprocessors']} multiprocessors, "
            f"{'ROCm' if gpu['hip'] else 'CUDA'} {gpu['hip'] or gpu['cuda']}; times are those "
            f"between two events."
        )
    lines += [
        f"{machine['processor']}, {machine['cores']} cores, {machine['threads']} threads, torch "
        f"{machine['torch']} ({machine['torch_cpu_capability']}), commit "
        f"{machine['commit'] or 'unknown'}, load average {machine['load_average']} at the start "
        f"and {machine['load_average_at_end']} at the end.",
        f"Least and median time of a call; rates and ratios (x: how many times as fast as that) "
        f"are of least times. "
        f"hot: one copy of the weight. cold: {cold}, {result['cache_bytes'] >> 20} MiB.",
        f"Read bandwidth: {probes['read_bandwidth']}. int8 peak: {probes['int8_peak']}."
        + (f" bfloat16 peak: {bfloat16_peak}." if bfloat16_peak else ""),
    ]
    told = {
        (row["contender"], row["note"])
        for cell in result["cells"]
        for row in cell["rows"]
        if row["note"]
    }
    lines += [f"{contender}: {note}." for contender, note in sorted(told)]
    left_out = {
        f"{each['name']} left out of {cell['op']} {cell['out_features']} x {cell['in_features']}: "
        f"{each['reason']}."
        for cell in result["cells"]
        for each in cell["excluded"]
    }
    lines += sorted(left_out)
    absent = [peer for peer in result["peers"] if not peer["available"]]
    lines += [
        f"Peer {peer['name']} is not here: {peer['reason']}. Install: {peer['install']}"
        for peer in absent
    ]
    return lines


def markdown(result: Mapping[str, Any]) -> str:
    """The table in Markdown, with the notes below it."""
    rule = ("---",) * 6 + ("---:",) * (len(COLUMNS) - 6)
    lines = [COLUMNS, rule, *rows(result)]
    return "\n".join([*("| " + " | ".join(line) + " |" for line in lines), "", *notes(result), ""])
