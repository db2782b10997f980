"""Results of ``arb eval --tasks``, as a run keeps them in its ``tasks.json``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from attrs import frozen

import arb_ternary
from arb_ternary.errors import ArbError, EnvironmentProblem
from arb_ternary.plugins.discovery import install_command

#: Columns of a table of results.
COLUMNS: Final = ("task", "samples", "examples", "metric", "value", "±")


@frozen
class Metric:
    """A number that a task gives.

    Attributes:
        name: its name in lm-evaluation-harness, such as ``acc_norm``.
        filter: what picked the answer out of the model's text, such as ``strict-match``; empty if
            nothing did.
        value: the number.
        stderr: its standard error; None if it is not known.
    """

    name: str
    filter: str
    value: float
    stderr: float | None

    @property
    def title(self) -> str:
        """The name for readers."""
        name = self.name.replace("_", " ")
        return f"{name} ({self.filter})" if self.filter else name


@frozen
class TaskResult:
    """The result of a task.

    Attributes:
        task: name of the task.
        metrics: its numbers.
        samples: number of its samples; None for a group of tasks.
        num_fewshot: number of examples before each question; None for a group of several numbers.
        limit: number of samples to which the evaluation was limited; None = all.
        chat: whether the questions were turns of a conversation.
        step: the training step of the model; None for a model that is no run.
        lm_eval: version of lm-evaluation-harness.
    """

    task: str
    metrics: tuple[Metric, ...]
    samples: int | None
    num_fewshot: int | None
    limit: int | None
    chat: bool
    step: int | None
    lm_eval: str

    def rows(self) -> Iterator[tuple[str, ...]]:
        """Yield a row per metric for readers: see ``COLUMNS``."""
        for metric in self.metrics:
            yield (
                self.task,
                "" if self.samples is None else str(self.samples),
                "" if self.num_fewshot is None else str(self.num_fewshot),
                metric.title,
                f"{metric.value:.4f}",
                "" if metric.stderr is None else f"{metric.stderr:.4f}",
            )

    @classmethod
    def from_json(cls, task: str, record: Mapping[str, Any]) -> TaskResult:
        """Return the result of which ``record`` is the JSON."""
        return cls(
            task=task,
            metrics=tuple(_metrics(record["metrics"])),
            samples=record["samples"],
            num_fewshot=record["num_fewshot"],
            limit=record["limit"],
            chat=record["apply_chat_template"],
            step=record["step"],
            lm_eval=record["lm_eval"],
        )


def find_evaluate_tasks(wanted_by: str) -> Callable[..., dict[str, Any]]:
    """Return ``arb_ternary.evaluate_tasks``, whose package is above this one.

    Args:
        wanted_by: what the error names.

    Raises:
        EnvironmentProblem: the package is not installed.
    """
    try:
        evaluate_tasks: Callable[..., dict[str, Any]] = arb_ternary.evaluate_tasks
    except ImportError as error:
        raise EnvironmentProblem(
            f"{wanted_by}: needs a package that is not installed: arb-ternary-evals",
            install_command("arb-ternary-evals"),
        ) from error
    return evaluate_tasks


def task_records(found: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return what ``arb_ternary.evaluate_tasks`` has found as one record per task."""
    shared = {key: value for key, value in found.items() if key != "tasks"}
    return {name: {**shared, **record} for name, record in found["tasks"].items()}


def read_task_results(records: Mapping[str, Any], source: str) -> list[TaskResult]:
    """Return results from their records.

    Args:
        records: the record of each task.
        source: what the error names.

    Raises:
        ArbError: they are damaged.
    """
    try:
        return [TaskResult.from_json(name, record) for name, record in records.items()]
    except (KeyError, TypeError, AttributeError) as error:
        raise ArbError(
            f"{source}: is no file of results: {type(error).__name__}: {error}",
            "Remove it, and evaluate again: arb eval RUN --tasks NAME",
        ) from error


def _metrics(values: Mapping[str, float]) -> Iterator[Metric]:
    for key, value in values.items():
        name, _, chosen = key.partition(",")
        if name.endswith("_stderr"):
            continue
        stderr = values.get(f"{name}_stderr,{chosen}")
        yield Metric(name, "" if chosen == "none" else chosen, value, stderr)
