"""What a trial gave: read from the directory of its run, kept as one small JSON file a trial."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from arb_ternary.errors import ArbError, ComponentError
from arb_ternary_bench.child import ChildRun, Ended
from arb_ternary_bench.quality.trials import Trial
from arb_ternary_train.directory import RunDirectory, write_json
from arb_ternary_train.metrics import read_metrics

FORMAT: Final = "arb-ternary-quality-trial"
VERSION: Final = 1

#: What an outcome takes over from a run's audit.
_COUNTED: Final = (
    "parameters",
    "float_parameters",
    "ternary_weights",
    "state_bytes",
    "state_bits_per_parameter",
)


def measured(trial: Trial, child: ChildRun, ended: Ended, threads: int) -> dict[str, Any]:
    """The outcome of a run that has finished; a loss that is not finite counts as a failure.

    Raises:
        ComponentError: it trained on another number of tokens than the rest of the study.
    """
    report = child.report()
    run = RunDirectory(child.directory)
    if report["tokens"] != trial.tokens:
        raise ComponentError(
            f"recipe {trial.rule!r}: {trial.name} trained on {report['tokens']:,} tokens, not "
            f"{trial.tokens:,}",
            "Every recipe trains on the same tokens.",
        )
    loss = float(report["validation_loss"])
    record = run.record()
    return {
        **_head(trial),
        "loss": loss if math.isfinite(loss) else None,
        "failure": None if math.isfinite(loss) else f"the loss is {loss}",
        "curve": _curve(run),
        "unigram_entropy": report["unigram_entropy"],
        "bigram_entropy": report["bigram_entropy"],
        **{key: report["audit"][key] for key in _COUNTED},
        "linears": report["linears"],
        "tokens_per_second": report["tokens_per_second"],
        "peak_bytes": ended.peak_bytes,
        "threads": threads,
        "backend": record["backend"]["name"],
        "versions": record["versions"],
    }


def failed(trial: Trial, reason: str) -> dict[str, Any]:
    """The outcome of a run that ended with an error."""
    return {**_head(trial), "loss": None, "failure": reason}


def loss_of(outcome: Mapping[str, Any]) -> float:
    """The loss; infinite where the run failed."""
    loss = outcome["loss"]
    return math.inf if loss is None else float(loss)


def write_outcome(path: Path, outcome: Mapping[str, Any]) -> None:
    """Write an outcome, whole or not at all.

    Raises:
        ArbError: the disk does not take it.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, outcome)
    except OSError as error:
        raise ArbError(
            f"{path}: cannot be written: {error}", "Free some space and repeat the command."
        ) from error


def read_outcome(path: Path) -> dict[str, Any] | None:
    """The outcome in ``path``; None where there is no such file.

    Raises:
        ArbError: it is something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ArbError(
            f"{path}: cannot be read: {error}", "Delete it, and the trial is run again."
        ) from error
    if not isinstance(content, dict) or (content.get("format"), content.get("version")) != (
        FORMAT,
        VERSION,
    ):
        raise ArbError(
            f"{path}: not the outcome of a trial", "Delete it, and the trial is run again."
        )
    return content


def _head(trial: Trial) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "version": VERSION,
        "stage": trial.stage,
        "rule": trial.rule,
        "number": trial.number,
        "digest": trial.digest,
        "settings": dict(trial.settings),
        "config": dict(trial.config),
        "tokens": trial.tokens,
    }


def _curve(run: RunDirectory) -> list[list[float]]:
    """Tokens trained on and held-out loss at each evaluation that gave one; the last is on all
    held-out tokens.
    """
    tokens = {0: 0}
    curve = []
    for record in read_metrics(run.metrics_file):
        if record["event"] == "train":
            tokens[record["step"]] = record["tokens"]
        elif record["event"] == "validation" and isinstance(record["loss"], int | float):
            curve.append([tokens[record["step"]], record["loss"]])
    return curve
