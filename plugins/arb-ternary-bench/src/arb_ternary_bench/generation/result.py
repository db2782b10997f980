"""The result of the generation bench as a table."""

from __future__ import annotations

from arb_ternary_bench.machine import describe
from arb_ternary_bench.table import Column, Record, ResultTable, mebibytes, number, percent, ratio


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def notes(result: Record) -> list[str]:
    """Return what a reader of the table has to know."""
    bandwidth = result["read_bandwidth"]
    clock = ", in seconds of processor time" if result["clock"] == "processor" else ""
    measured = ""
    if bandwidth:
        measured = f" and {bandwidth / 1e9:.1f} GB/s, measured in turns with the rest"
    lines = [
        f"Random weights and prompts, the likeliest token each time, {result['new_tokens']} new "
        "tokens per sequence, the first of which comes with the prompt; medians over tokens and "
        f"repetitions{clock}. {describe(result['machine'])} llama.cpp: "
        f"{result['llama_cpp'] or 'not installed'}.",
        "Share of the read bandwidth: bytes of the weights that a pass reads whole, over its time"
        f"{measured}; weights that a cache holds can exceed it. Memory is that of the process "
        "beyond what its libraries hold.",
    ]
    for shape in result["shapes"]:
        millions = number(shape["weights"], 1, 1e-6)
        lines.append(f"{shape['name']}: {shape['what']}, {millions} million weights.")
    lines.extend(
        f"{each['shape']}: {each['name']} is left out: {each['reason']}."
        for each in result["excluded"]
    )
    return lines


TABLE = ResultTable(
    columns=(
        Column("model", lambda row: row["shape"], left=True),
        Column("prompt x batch", lambda row: f"{row['prompt']} x {row['batch']}", left=True),
        Column("program", lambda row: row["name"], left=True),
        Column("prefill tokens/s", lambda row: _rate(row["prefill_tokens_per_second"])),
        Column("x TQ2_0", lambda row: ratio(row["prefill_ratio"]["tq2_0"])),
        Column("decode tokens/s", lambda row: _rate(row["decode_tokens_per_second"])),
        Column("x TQ2_0", lambda row: ratio(row["decode_ratio"]["tq2_0"])),
        Column("first token ms", lambda row: number(row["first_token_seconds"], 0, 1e3)),
        Column("of read bandwidth", lambda row: percent(row["of_read_bandwidth"])),
        Column("memory MiB", lambda row: mebibytes(row["resident_bytes"] - row["base_bytes"])),
    ),
    records=lambda result: result["rows"],
    notes=notes,
)
