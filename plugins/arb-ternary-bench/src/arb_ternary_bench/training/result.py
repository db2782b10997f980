"""The result of the training bench as tables: speed and memory, and the parts of a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from attrs import frozen

from arb_ternary_bench.machine import describe
from arb_ternary_bench.table import Column, Record, ResultTable, mebibytes, number, ratio
from arb_ternary_bench.training.parts import PARTS

#: Short names of the parts.
_SHORT: Final = {"norms and quantisation": "norms, quant.", "everything else": "else"}


def _records(result: Record) -> Iterator[Record]:
    for cell in result["cells"]:
        for row in cell["rows"]:
            yield {"decoder": cell["size"], "threads": cell["threads"], **row}


def _profiled(result: Record) -> Iterator[Record]:
    return (row for row in _records(result) if row["parts"])


def _milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return number(seconds, 1 if seconds < 1 else 0, 1e3)


def _part(part: str) -> Column:
    def text(row: Record) -> str:
        parts: Mapping[str, float] = row["parts"] or {}
        return _milliseconds(parts.get(part))

    return Column(_SHORT.get(part, part), text)


_NAMES: Final = (
    Column("decoder", lambda row: row["decoder"], left=True),
    Column("threads", lambda row: str(row["threads"])),
    Column("training", lambda row: row["name"], left=True),
)
_SPEEDS: Final = (
    Column("tokens/s", lambda row: number(row["tokens_per_second"])),
    Column("x best float", lambda row: ratio(row["x_best_float"])),
    Column("x QAT compiled", lambda row: ratio(row["x_qat_compiled"])),
)
_STEP: Final = Column("step ms", lambda row: _milliseconds(row["seconds_min"]))
_MEMORY: Final = (
    Column("peak MiB", lambda row: mebibytes(row["peak_bytes"])),
    Column("bytes per parameter", lambda row: number(row["state_bytes_per_parameter"], 2)),
)
_PARTS: Final = tuple(map(_part, PARTS))


def notes(result: Record) -> list[str]:
    """Return what a reader of the tables has to know."""
    machine = result["machine"]
    clock = "on the wall" if result["clock"] == "wall" else "the processor time of the process"
    lines = [
        f"{describe(machine, threads=False)} Votes: {_backends(machine) or 'no backend'}.",
        "A step: forward, cross entropy, backward, update, by the loop of arb train. Times are "
        f"{clock}, the least of all steps; tokens per second and ratios follow from these. Peak "
        "memory is that of a process that trains nothing else, compilers included; bytes per "
        "parameter count gradients where they are stored.",
    ]
    ways: dict[str, str] = {}
    for cell in result["cells"]:
        lines += _cell_notes(cell)
        ways |= {row["way"]: row["what"] for row in cell["rows"]}
    lines += [f"{name}: {what}." for name, what in ways.items()]
    profiled = [row for row in _records(result) if row["profile"]]
    if profiled:
        ratios = [row["profile"]["total"] / row["seconds_min"] for row in profiled]
        lines.append(
            "Parts: profiled steps in a further process, where ranges around kernels and modules "
            f"say what an operation belongs to. They took {min(ratios):.2f} to {max(ratios):.2f} "
            "times as long as the fastest step without the profiler. Where that is more than 1, "
            "calls are what the other parts leave of the step; otherwise all parts are scaled to "
            "it. In compiled models, what the compiler fused counts as else."
        )
    return lines


def _cell_notes(cell: Record) -> list[str]:
    title = f"{cell['size']}, {cell['threads']} threads"
    shape = cell["shape"]
    lines = [
        f"{title}: {shape['layers']} layers of {shape['width']}, vocabulary "
        f"{shape['vocabulary']:,}, {shape['batch']} x {shape['block']} tokens; "
        f"{cell['in_turns']}; load average {cell['load_average']} to "
        f"{cell['load_average_at_end']}."
    ]
    lines.extend(
        f"{title}: {each['name']} is left out: {each['reason'].splitlines()[0]}"
        for each in cell["excluded"]
    )
    return lines


def _backends(machine: Mapping[str, Any]) -> str:
    sets = machine["instruction_sets"]
    found = []
    for name, distribution in machine["backends"].items():
        found.append(f"{distribution} ({sets[name]})" if sets[name] else distribution)
    return ", ".join(found)


#: Everything in one table, for a terminal.
_ALL: Final = (*_NAMES, *_SPEEDS, _STEP, *_PARTS, *_MEMORY)
_WHOLE: Final = ResultTable((*_NAMES, *_SPEEDS, _STEP, *_MEMORY), _records)
_SPLIT: Final = ResultTable((*_NAMES, _STEP, *_PARTS), _profiled)


@frozen
class TrainTable(ResultTable):
    """The table; in Markdown it is two, so that each is narrow enough for a page."""

    def markdown(self, result: Record) -> str:
        """Return speeds and memory, then the parts of profiled steps, then the notes."""
        blocks = ["\n".join(_WHOLE.lines(result))]
        if any(_profiled(result)):
            blocks += ["Milliseconds per step by part:", "\n".join(_SPLIT.lines(result))]
        blocks.append("\n".join(f"- {note}" for note in self.notes(result)))
        return "\n\n".join(blocks) + "\n"


TABLE = TrainTable(_ALL, _records, notes)
