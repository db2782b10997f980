"""The result of the step bench as a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

COLUMNS: Final = (
    "training",
    "min ms",
    "median ms",
    "tokens/s",
    "x bf16",
    "x QAT",
    "x QAT compiled",
    "peak MiB",
    "of it model MiB",
    "bytes a weight",
)
_RATIOS: Final = ("bfloat16", "qat", "qat_compiled")


def rows(result: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """The table's rows."""
    for row in result["rows"]:
        ratios = (row["speedup"][key] for key in _RATIOS)
        yield (
            row["name"],
            f"{row['seconds_min'] * 1e3:,.2f}",
            f"{row['seconds_median'] * 1e3:,.2f}",
            f"{row['tokens_per_second']:,.0f}",
            *("" if ratio is None else f"{ratio:.2f}" for ratio in ratios),
            f"{row['peak_bytes'] / 2**20:,.0f}",
            f"{(row['peak_bytes'] - row['base_bytes']) / 2**20:,.0f}",
            f"{row['state_bytes_per_weight']:.2f}",
        )


def notes(result: Mapping[str, Any]) -> list[str]:
    """What a reader of the table has to know."""
    machine = result["machine"]
    gpu = f"{machine['gpu']['name']}, " if machine.get("gpu") else ""
    held = "of the tensors on the GPU of a process" if gpu else "that of a process"
    lines = [
        f"One step of a {result['title']}: forward, backward (also to the input) and update. "
        f"{gpu}{machine['processor']}, {machine['cores']} cores, {machine['threads']} threads, "
        f"torch {machine['torch']} ({machine['torch_cpu_capability']}), commit "
        f"{machine['commit'] or 'unknown'}, load average {machine['load_average']} at the start "
        f"and {machine['load_average_at_end']} at the end.",
        "x: how many times as fast, of least times; bf16 is the faster of the two. Peak memory is "
        f"{held} that trains nothing else; bytes a weight count gradients where they are stored.",
    ]
    lines += [f"{row['name']}: {row['what']}." for row in result["rows"]]
    lines += [
        f"{each['name']} is left out: {each['reason'].splitlines()[0]}"
        for each in result["excluded"]
    ]
    return lines


def markdown(result: Mapping[str, Any]) -> str:
    """The table in Markdown, with the notes below it."""
    lines = [COLUMNS, ("---", *("---:",) * (len(COLUMNS) - 1)), *rows(result)]
    return "\n".join([*("| " + " | ".join(line) + " |" for line in lines), "", *notes(result), ""])
