"""Tables of ``benchmarks/kernels.py`` for the reports: one line per shape and number of rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kernels import notes

Cell = Mapping[str, Any]
#: A model that writes text has at most so many rows: the weight comes from memory.
COLD_ROWS = 16
WITH_QUANTISATION = " + quantize_rows"


def product_table(result: Mapping[str, Any], op: str = "linear", backend: str = "cpu") -> str:
    """Return every cell of a product; what misses its goal is in italics."""
    lines = [
        "| N x K | M | µs | GB/s | of read | GOP/s | of int8 peak | x torch bf16 | x torch int8 | "
        "x TQ2_0 |",
        "|---|" + "---:|" * 9,
    ]
    for cell in _cells(result, op):
        ours = _row(cell, backend)
        goals = _goals(cell["rows_m"], op)
        ggml = _find(cell, "ggml TQ2_0")
        shown = {
            "read": ours["of_read_bandwidth"] if cell["cache"] == "cold" else None,
            "peak": ours["of_int8_peak"],
            "bfloat16": ours["speedup"]["torch_bfloat16"],
            "int8": ours["speedup"]["torch_int8"],
            "ggml": ggml
            and ggml["seconds_min"] / _row(cell, backend + WITH_QUANTISATION)["seconds_min"],
        }
        texts = {
            key: _marked(value, goals.get(key, 0.0), share=key in ("read", "peak"))
            for key, value in shown.items()
        }
        lines.append(
            f"| {cell['out_features']} x {cell['in_features']} | {cell['rows_m']} | "
            f"{ours['seconds_min'] * 1e6:,.1f} | {ours['bytes_per_second'] / 1e9:.1f} | "
            f"{texts['read']} | {ours['operations_per_second'] / 1e9:,.0f} | {texts['peak']} | "
            f"{texts['bfloat16']} | {texts['int8']} | {texts['ggml']} |"
        )
    return "\n".join(lines)


def back_table(result: Mapping[str, Any], backend: str = "cpu") -> str:
    """Return the product with the gradient, relative to the forward product, and casts of votes."""
    lines = [
        "| N x K | M | `linear_grad_input`, µs | of the forward's speed | "
        "`cast_scaled_votes_int8`, µs | of int8 peak |",
        "|---|" + "---:|" * 5,
    ]
    forward = {_place(cell): _row(cell, backend) for cell in _cells(result, "linear")}
    casts = {_place(cell): _row(cell, backend) for cell in _cells(result, "cast_scaled_votes_int8")}
    for cell in _cells(result, "linear_grad_input"):
        back = _row(cell, backend)
        ahead = forward[_place(cell)]
        cast = casts[_place(cell)]
        votes = f"{cast['seconds_min'] * 1e6:,.1f} | {cast['of_int8_peak']:.0%}"
        lines.append(
            f"| {cell['out_features']} x {cell['in_features']} | {cell['rows_m']} | "
            f"{back['seconds_min'] * 1e6:,.1f} "
            f"| {_marked(ahead['seconds_min'] / back['seconds_min'], 0.8)} | {votes} |"
        )
    return "\n".join(lines)


def update_table(result: Mapping[str, Any], backend: str = "cpu") -> str:
    """Return the update of a step, relative to fused AdamW on as many float32 parameters."""
    lines = ["| N x K | cache | µs | GB/s | x fused AdamW |", "|---|---|" + "---:|" * 3]
    for cell in result["cells"]:
        if cell["op"] == "apply_scaled_votes":
            row = _row(cell, backend)
            lines.append(
                f"| {cell['out_features']} x {cell['in_features']} | {cell['cache']} | "
                f"{row['seconds_min'] * 1e6:,.1f} | {row['bytes_per_second'] / 1e9:.1f} | "
                f"{_marked(row['speedup']['torch_adamw'], 5.0)} |"
            )
    return "\n".join([*lines, "", *notes(result)[:4]])


def _cells(result: Mapping[str, Any], op: str) -> Iterator[Cell]:
    for cell in result["cells"]:
        if cell["op"] == op and cell["cache"] == ("cold" if cell["rows_m"] <= COLD_ROWS else "hot"):
            yield cell


def _place(cell: Cell) -> tuple[int, int, int]:
    return cell["out_features"], cell["in_features"], cell["rows_m"]


def _find(cell: Cell, contender: str) -> Mapping[str, Any] | None:
    return next((row for row in cell["rows"] if row["contender"] == contender), None)


def _row(cell: Cell, contender: str) -> Mapping[str, Any]:
    row = _find(cell, contender)
    if row is None:
        raise SystemExit(f"{contender} is not among the contenders of {cell['op']}")
    return row


def _goals(rows: int, op: str) -> dict[str, float]:
    if op != "linear":
        return {}
    if rows == 1:
        return {"read": 0.85, "bfloat16": 8.0, "ggml": 1.5}
    return {"peak": 0.9, "int8": 1.0, "bfloat16": 1.8, "ggml": 6.0} if rows >= 256 else {}


def _marked(value: float | None, goal: float, *, share: bool = False) -> str:
    if value is None:
        return ""
    text = f"{value:.0%}" if share else f"{value:.2f}"
    return text if value >= goal else f"*{text}*"
