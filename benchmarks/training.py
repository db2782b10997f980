"""Time whole training steps of decoders: votes, quantisation-aware training, float32, bfloat16.

Every method is a run of `arb train` in a process of its own; the methods take turns. A method is
named by its parts, such as cpu/int8, cpu/pure/int8/all-bfloat16, qat/compiled, float32/compiled.
"""

from __future__ import annotations

import json
import tempfile
from itertools import product
from pathlib import Path
from typing import Any, Final

import click
import numpy as np
from attrs import define, field

from _kernels.gpu import gpu_name
from _training.child import measure_run
from _training.methods import Method
from _training.sizes import SIZES, TrainSize
from arb_ternary.cli.options import as_json
from arb_ternary.config.yaml_document import dump_yaml
from arb_ternary.errors import ArbError
from harness import script
from harness.machine import describe, load_average, machine_facts
from harness.table import Column, Record, ResultTable, mebibytes, number, ratio

_METHODS: Final = (
    "cpu/int8,cpu/pure/int8/all-bfloat16,float32/compiled,bfloat16/compiled,qat/compiled"
)
#: Steps of a run that are not timed: the first of votes casts none, compilers work, memory grows.
_SETTLING: Final = 4
#: Steps of the file of tokens, which is read again after these.
_DATA_STEPS: Final = 64


@define(eq=False)
class Measured:
    """What the runs of a method gave so far.

    Attributes:
        method: how the runs train.
        seconds: of every timed step.
        peak_bytes: the largest of the runs.
        result: the report of the last run.
    """

    method: Method
    seconds: list[float] = field(factory=list)
    peak_bytes: int = 0
    result: dict[str, Any] = field(factory=dict)

    def train(self, size: TrainSize, steps: int, threads: int, device: str, folder: Path) -> None:
        """Train once.

        Raises:
            ArbError: the run failed, or its loss did not fall.
        """
        name = self.method.name.replace("/", "-")
        config = folder / f"{name}.yaml"
        tokens = str(folder / "tokens.npy")
        plain = self.method.config(size, tokens, steps + _SETTLING, device)
        config.write_text(dump_yaml(plain), encoding="utf-8")
        run = Path(tempfile.mkdtemp(prefix=name, dir=folder)) / "run"
        found = measure_run(config, run, title=self.method.name, threads=threads, device=device)
        self.result = json.loads((run / "result.json").read_text(encoding="utf-8"))
        check_learning(self.method.name, run)
        self.seconds += found["seconds"][_SETTLING - 1 :]
        self.peak_bytes = max(self.peak_bytes, found["peak_bytes"])

    def row(self, size: TrainSize) -> dict[str, Any]:
        """Return its row of the result."""
        audit = self.result["audit"]
        # A gradient is stored for each float parameter.
        gradients = sum(
            row["nbytes"] for row in audit["rows"] if row["what"] == "float parameters, trainable"
        )
        least = min(self.seconds)
        return {
            "name": self.method.name,
            "role": self.method.role,
            "seconds_min": least,
            "steps": len(self.seconds),
            "tokens_per_second": size.tokens / least,
            "parameters": audit["parameters"],
            "peak_bytes": self.peak_bytes,
            "state_bytes_per_parameter": (audit["state_bytes"] + gradients) / audit["parameters"],
        }


def check_learning(name: str, run: Path) -> None:
    """Check that a run's loss fell.

    Raises:
        ArbError: it did not.
    """
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    losses = [event["loss"] for event in map(json.loads, lines) if event["event"] == "train"]
    if min(losses) >= losses[0]:
        raise ArbError(f"{name}: the loss never fell below {losses[0]:.4f}, its first value")


def write_tokens(file: Path, size: TrainSize) -> None:
    """Write random tokens, small ids more often than large ones, so that there is much to learn."""
    drawn = np.random.default_rng(0).random((_DATA_STEPS + 1) * size.tokens)
    np.save(file, (size.vocabulary * drawn**4).astype(np.uint16))


def measure_cell(
    size: TrainSize, methods: tuple[Method, ...], threads: int, steps: int, rounds: int, device: str
) -> dict[str, Any]:
    """Measure one decoder with one number of threads."""
    everyone = [Measured(method) for method in methods]
    with tempfile.TemporaryDirectory(prefix="arb-benchmarks-") as name:
        write_tokens(Path(name) / "tokens.npy", size)
        for _, each in product(range(rounds), everyone):
            each.train(size, steps, threads, device, Path(name))
            script.say(f"{size.name}, {threads} threads: {each.method.name}")
    return {
        "size": size.name,
        "threads": threads,
        "rows": with_ratios([each.row(size) for each in everyone]),
    }


def with_ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add to each row how many times as fast it is as the fastest float method and QAT."""
    for role in ("float", "qat"):
        least = min((row["seconds_min"] for row in rows if row["role"] == role), default=None)
        for row in rows:
            row[f"x_{role}"] = least and least / row["seconds_min"]
    return rows


def notes(result: Record) -> list[str]:
    """Return what a reader of the table has to know."""
    return [
        describe(result["machine"], threads=False),
        "A step: all that arb train does from the end of an update to that of the next. Tokens per "
        "second and ratios are of the least time. Peak memory is that of a process that trains "
        "nothing else, compilers included; bytes per parameter count gradients where they are "
        "stored.",
    ]


TABLE = ResultTable(
    columns=(
        Column("decoder", lambda row: row["decoder"], left=True),
        Column("threads", lambda row: str(row["threads"])),
        Column("training", lambda row: row["name"], left=True),
        Column("tokens/s", lambda row: number(row["tokens_per_second"])),
        Column("x float", lambda row: ratio(row["x_float"])),
        Column("x QAT", lambda row: ratio(row["x_qat"])),
        Column("step ms", lambda row: number(row["seconds_min"], 1, 1e3)),
        Column("peak MiB", lambda row: mebibytes(row["peak_bytes"])),
        Column("bytes per parameter", lambda row: number(row["state_bytes_per_parameter"], 2)),
    ),
    records=lambda result: [
        {"decoder": cell["size"], "threads": cell["threads"], **row}
        for cell in result["cells"]
        for row in cell["rows"]
    ],
    notes=notes,
)


@click.command(help=__doc__)
@script.comma_list(
    "--sizes", "demo,512x8,1024x12,2048x4", SIZES.__getitem__, f"Of {', '.join(SIZES)}."
)
@script.comma_list("--methods", _METHODS, Method, "Methods of training.")
@script.comma_list("--threads", "1,2", script.count, "Numbers of threads, each measured.")
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:N.")
@click.option("--steps", default=16, show_default=True, help="Timed steps of each run.")
@click.option("--rounds", default=2, show_default=True, help="Runs of each method.")
@script.out
@as_json
def main(
    sizes: tuple[TrainSize, ...],
    methods: tuple[Method, ...],
    threads: tuple[int, ...],
    device: str,
    steps: int,
    rounds: int,
    out: Path | None,
    as_json: bool,
) -> None:
    """Measure and show."""
    facts = {**machine_facts(), "gpu": gpu_name(device)}
    cells = [
        measure_cell(size, methods, count, steps, rounds, device)
        for size, count in product(sizes, threads)
    ]
    result = {"machine": {**facts, "load_average_at_end": load_average()}, "cells": cells}
    script.finish(result, TABLE, out, as_json=as_json)


if __name__ == "__main__":
    script.main(main)
