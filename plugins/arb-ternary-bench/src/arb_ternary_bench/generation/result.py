"""The result of the generation bench as a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

COLUMNS: Final = (
    "model",
    "prompt x batch",
    "program",
    "prefill tokens/s",
    "x TQ2_0",
    "decode tokens/s",
    "x TQ2_0",
    "first token ms",
    "of read bandwidth",
    "memory MiB",
)


def rows(result: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """The table's rows."""
    for row in result["rows"]:
        share = row["of_read_bandwidth"]
        yield (
            row["shape"],
            f"{row['prompt']} x {row['batch']}",
            row["name"],
            _number(row["prefill_tokens_per_second"]),
            _ratio(row["prefill_ratio"]["tq2_0"]),
            _number(row["decode_tokens_per_second"]),
            _ratio(row["decode_ratio"]["tq2_0"]),
            f"{row['first_token_seconds'] * 1e3:,.0f}",
            "" if share is None else f"{share:.0%}",
            f"{(row['resident_bytes'] - row['base_bytes']) / 2**20:,.0f}",
        )


def notes(result: Mapping[str, Any]) -> list[str]:
    """What a reader of the table has to know."""
    machine = result["machine"]
    bandwidth = result["read_bandwidth"]
    threads = "1 thread" if machine["threads"] == 1 else f"{machine['threads']} threads"
    lines = [
        f"Random weights and prompts, the likeliest token each time, {result['new_tokens']} new "
        f"tokens a sequence, the "
        f"first of which comes with the prompt; medians over tokens and repetitions"
        f"{', in seconds of processor time' if result['clock'] == 'processor' else ''}. "
        f"{machine['processor']}, "
        f"{machine['cores']} cores, {threads}, torch {machine['torch']} "
        f"({machine['torch_cpu_capability']}), llama.cpp of "
        f"{result['llama_cpp'] or 'no installed package'}, commit "
        f"{machine['commit'] or 'unknown'}, load average {machine['load_average']} at the start "
        f"and "
        f"{machine['load_average_at_end']} at the end.",
        "Share of the read bandwidth: bytes of the weights that a pass reads whole, over its time"
        + (f" and {bandwidth / 1e9:.1f} GB/s, measured in turns with the rest" if bandwidth else "")
        + (
            "; weights that a cache holds can exceed it. Memory is that of the process beyond what "
            "its libraries hold."
        ),
    ]
    lines += [
        f"{shape['name']}: {shape['what']}, {shape['weights'] / 1e6:,.1f} million weights."
        for shape in result["shapes"]
    ]
    lines += [
        f"{each['shape']}: {each['name']} is left out: {each['reason']}."
        for each in result["excluded"]
    ]
    return lines


def markdown(result: Mapping[str, Any]) -> str:
    """The table in Markdown, with the notes below it."""
    lines = [COLUMNS, ("---", "---", "---", *("---:",) * (len(COLUMNS) - 3)), *rows(result)]
    return "\n".join([*("| " + " | ".join(line) + " |" for line in lines), "", *notes(result), ""])


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
