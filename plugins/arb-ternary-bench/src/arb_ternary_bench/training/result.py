"""The result of the training bench as a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from arb_ternary_bench.training.parts import PARTS

#: Short names of the parts, in their order.
_SHORT: Final = {"norms and quantisation": "norms, quant.", "everything else": "else"}
COLUMNS: Final = (
    "decoder",
    "threads",
    "training",
    "tokens/s",
    "x best float",
    "x QAT compiled",
    "step ms",
    *(_SHORT.get(part, part) for part in PARTS),
    "peak MiB",
    "bytes a parameter",
)
#: Where the parts begin among the columns.
_FIRST_PART: Final = COLUMNS.index(PARTS[0])


def rows(result: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """The table's rows."""
    for cell in result["cells"]:
        for row in cell["rows"]:
            parts = row["parts"] or {}
            yield (
                cell["size"],
                str(cell["threads"]),
                row["name"],
                f"{row['tokens_per_second']:,.0f}",
                *(
                    "" if row[key] is None else f"{row[key]:.2f}"
                    for key in ("x_best_float", "x_qat_compiled")
                ),
                _milliseconds(row["seconds_min"]),
                *(_milliseconds(parts[part]) if part in parts else "" for part in PARTS),
                f"{row['peak_bytes'] / 2**20:,.0f}",
                f"{row['state_bytes_per_parameter']:.2f}",
            )


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f}" if seconds < 1 else f"{seconds * 1e3:,.0f}"


def notes(result: Mapping[str, Any]) -> list[str]:
    """What a reader of the table has to know."""
    machine = result["machine"]
    clock = "on the wall" if result["clock"] == "wall" else "the processor time of the process"
    lines = [
        f"{machine['processor']}, {machine['cores']} cores, torch {machine['torch']} "
        f"({machine['torch_cpu_capability']}), {_backends(machine) or 'no backend of votes'}, "
        f"commit {machine['commit'] or 'unknown'}, load average {machine['load_average']} at the "
        f"start and {machine['load_average_at_end']} at the end.",
        "A step: forward, cross entropy, backward, update, by the loop of arb train. Times are "
        f"{clock}, the least of all steps; tokens a second and ratios are of these. Peak memory is "
        "that of a process that trains nothing else, compilers included; bytes a parameter count "
        "gradients where they are stored.",
    ]
    told: dict[str, str] = {}
    for cell in result["cells"]:
        shape = cell["shape"]
        lines.append(
            f"{cell['size']}, {cell['threads']} threads: {shape['layers']} layers of "
            f"{shape['width']}, vocabulary {shape['vocabulary']:,}, {shape['batch']} x "
            f"{shape['block']} tokens; {cell['in_turns']}; load average {cell['load_average']} to "
            f"{cell['load_average_at_end']}."
        )
        lines += [
            f"{cell['size']}, {cell['threads']} threads: {each['name']} is left out: "
            f"{each['reason'].splitlines()[0]}"
            for each in cell["excluded"]
        ]
        told |= {row["way"]: row["what"] for row in cell["rows"]}
    lines += [f"{name}: {what}." for name, what in told.items()]
    profiled = [row for cell in result["cells"] for row in cell["rows"] if row["profile"]]
    if profiled:
        ratios = [row["profile"]["total"] / row["seconds_min"] for row in profiled]
        lines.append(
            "Parts: profiled steps in a further process, where ranges around kernels and modules "
            f"say what an operation belongs to. They took {min(ratios):.2f} to {max(ratios):.2f} "
            "times as long as the fastest step without the profiler. Where that is more than 1, "
            "calls are what the other parts leave of the step; else all parts are scaled to it. Of "
            "compiled models, what the compiler fused counts as else."
        )
    return lines


def _backends(machine: Mapping[str, Any]) -> str:
    sets = machine["instruction_sets"]
    return ", ".join(
        f"{distribution} ({sets[name]})" if sets[name] else distribution
        for name, distribution in machine["backends"].items()
    )


def markdown(result: Mapping[str, Any]) -> str:
    """Speeds and memory as a table in Markdown, the parts of the steps as another, and the
    notes.
    """
    all_rows = list(rows(result))
    parts = range(_FIRST_PART, _FIRST_PART + len(PARTS))
    whole = [*range(_FIRST_PART), *range(parts.stop, len(COLUMNS))]
    tables = [_table(whole, all_rows)]
    profiled = [row for row in all_rows if row[_FIRST_PART]]
    if profiled:
        tables += [
            "Milliseconds of a step by part:",
            _table([0, 1, 2, _FIRST_PART - 1, *parts], profiled),
        ]
    return "\n\n".join([*tables, "\n".join(f"- {note}" for note in notes(result))]) + "\n"


def _table(columns: Sequence[int], lines: Sequence[Sequence[str]]) -> str:
    rule = ["---" if column in (0, 2) else "---:" for column in range(len(COLUMNS))]
    return "\n".join(
        "| " + " | ".join(line[column] for column in columns) + " |"
        for line in (COLUMNS, rule, *lines)
    )
