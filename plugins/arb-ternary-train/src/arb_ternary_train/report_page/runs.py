"""What a report reads of a run: finished, stopped in the middle, or not yet begun."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import frozen

from arb_ternary.errors import ArbError
from arb_ternary_train.audit import Audit
from arb_ternary_train.directory import RunDirectory
from arb_ternary_train.metrics import read_metrics
from arb_ternary_train.task_results import TaskResult, read_task_results


@frozen(eq=False)
class ReportedRun:
    """The files of a run.

    Attributes:
        directory: the run directory.
        name: name of the run on the page; no other run there has it.
        record: content of ``run.json``.
        config: content of ``config.yaml``.
        metrics: records of ``metrics.jsonl``.
        result: content of ``result.json``; None if the run has not finished.
        audit: what the model stores; None if the run has not finished.
        tasks: results of tasks.
    """

    directory: RunDirectory
    name: str
    record: Mapping[str, Any]
    config: str
    metrics: Sequence[dict[str, Any]]
    result: Mapping[str, Any] | None
    audit: Audit | None
    tasks: Sequence[TaskResult]

    @property
    def noun(self) -> str:
        """Name of one prediction."""
        return str(self.record.get("prediction_noun", "token"))

    def last(self, event: str, key: str) -> Any:
        """Return ``key`` of the last record of ``event``; None if there is none."""
        for record in reversed(self.metrics):
            if record.get("event") == event:
                return record.get(key)
        return None

    def outcome(self, key: str, event: str, metric: str) -> Any:
        """Return ``key`` of the result, or of an unfinished run what its metrics say last."""
        return self.last(event, metric) if self.result is None else self.result[key]


def read_runs(paths: Sequence[Path]) -> list[ReportedRun]:
    """Read run directories.

    Raises:
        UsageProblem: one is no run.
        ArbError: a file is missing or damaged.
    """
    names = [path.resolve().name for path in paths]
    several = {name for name, count in Counter(names).items() if count > 1}
    return [
        _read_run(path, str(path) if name in several else name)
        for path, name in zip(paths, names, strict=True)
    ]


def _read_run(path: Path, name: str) -> ReportedRun:
    directory = RunDirectory.existing(path)
    result = directory.result() if directory.result_file.exists() else None
    audit = None
    if result is not None:
        try:
            audit = Audit.from_json(result["audit"])
            for key in ("steps", "tokens", "tokens_per_second", "validation_loss", "checks"):
                result[key]
        except (KeyError, TypeError) as error:
            raise ArbError(f"{directory.result_file}: the file is damaged: {error!r}") from error
    try:
        config = directory.config_file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ArbError(f"{directory.config_file}: cannot be read: {error}") from error
    return ReportedRun(
        directory=directory,
        name=name,
        record=directory.record(),
        config=config,
        metrics=read_metrics(directory.metrics_file) if directory.metrics_file.exists() else [],
        result=result,
        audit=audit,
        tasks=read_task_results(directory.task_results(), str(directory.tasks_file)),
    )
