"""Training runs of ``quality.py``.

In the script's folder, ``trials/`` has the outcome of every finished run, ``configs/`` has the
config files, and ``runs/`` has run directories and logs. So the same command continues what was
stopped.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from attrs import field, frozen

from arb_ternary.config.yaml_document import dump_yaml
from arb_ternary.errors import ArbError
from arb_ternary_train.directory import RunDirectory, write_json
from arb_ternary_train.metrics import read_metrics
from harness.child import Ended, start_arb
from harness.script import say

#: Exit code of `arb train` if the run itself failed, as opposed to its config or the machine.
_FAILURE: Final = 1
#: What an outcome takes over from a run's audit.
AUDITED: Final = ("parameters", "float_parameters", "state_bytes", "state_bits_per_parameter")
#: The same from its report.
_REPORTED: Final = ("unigram_entropy", "bigram_entropy", "tokens_per_second")

Outcome = dict[str, Any]


@frozen(eq=False, kw_only=True)
class PlannedRun:
    """A run to be trained.

    Attributes:
        name: of its files.
        config: the run's config, as its file holds it.
        tokens: that it trains on.
        labels: what the outcome says about the run besides its measurements.
    """

    name: str
    config: Mapping[str, Any] = field(repr=False)
    tokens: int
    labels: Mapping[str, Any] = field(factory=dict, repr=False)


def train(run: PlannedRun, folder: Path, threads: int) -> Outcome:
    """Return the outcome of a run: the one of an earlier command, or a new one.

    Raises:
        ArbError: the run could not be carried out at all.
    """
    file = folder / "trials" / f"{run.name}.json"
    if file.exists():
        known: Outcome = json.loads(file.read_text(encoding="utf-8"))
        if known["config"] == run.config:
            return known
        say(f"{run.name}: its config has changed since it was run; it is run again")
    config = folder / "configs" / f"{run.name}.yaml"
    directory = RunDirectory(folder / "runs" / run.name)
    text = dump_yaml(dict(run.config))
    if not config.exists() or config.read_text(encoding="utf-8") != text:
        shutil.rmtree(directory.path, ignore_errors=True)
    for path in (file, config, directory.path):
        path.parent.mkdir(parents=True, exist_ok=True)
    config.write_text(text, encoding="utf-8")
    arguments = ["train", str(config), "--run-dir", str(directory.path), "--resume", "auto"]
    child = start_arb(arguments, directory.path.with_name(f"{run.name}.log"), threads=threads)
    ended = child.wait()
    head = {"name": run.name, **run.labels, "config": run.config, "tokens": run.tokens}
    if ended.code == 0:
        outcome = {**head, **measured(directory, ended)}
    elif ended.code == _FAILURE:
        outcome = {**head, "loss": None, "failure": child.log_tail()}
    else:
        raise ArbError(
            f"{run.name}: the run ended with {ended.code}; see {child.log}", child.log_tail()
        )
    write_json(file, outcome)
    shutil.rmtree(directory.checkpoints, ignore_errors=True)
    say(f"{run.name}: loss {outcome['loss']}")
    return outcome


def measured(directory: RunDirectory, ended: Ended) -> Outcome:
    """Return what a finished run reached; a loss that is not finite counts as a failure."""
    report = json.loads(directory.result_file.read_text(encoding="utf-8"))
    loss = float(report["validation_loss"])
    finite = math.isfinite(loss)
    return {
        "loss": loss if finite else None,
        "failure": None if finite else f"the loss is {loss}",
        "curve": _curve(directory),
        **{key: report["audit"][key] for key in AUDITED},
        **{key: report[key] for key in _REPORTED},
        "peak_bytes": ended.peak_bytes,
    }


def _curve(directory: RunDirectory) -> list[list[float]]:
    """Return tokens and held-out loss of each evaluation; the last is on all held-out tokens."""
    tokens = {0: 0}
    curve = []
    for record in read_metrics(directory.metrics_file):
        if record["event"] == "train":
            tokens[record["step"]] = record["tokens"]
        elif record["event"] == "validation" and isinstance(record["loss"], int | float):
            curve.append([tokens[record["step"]], record["loss"]])
    return curve


def choose(losses: Sequence[float | None]) -> int | None:
    """Return the index of the least loss, the first of equals; None if every run failed."""
    finite = [(loss, index) for index, loss in enumerate(losses) if loss is not None]
    return min(finite)[1] if finite else None
