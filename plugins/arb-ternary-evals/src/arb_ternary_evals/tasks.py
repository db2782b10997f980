"""Evaluate a model on tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from arb_ternary.errors import ArbError, DataError, UsageProblem, nearest
from arb_ternary_chat.model import load_model


def evaluate_tasks(
    source: str | Path,
    tasks: Sequence[str],
    *,
    include: str | Path | None = None,
    limit: int | None = None,
    backend: str | None = None,
    device: str | None = None,
) -> dict[str, Any]:
    """Evaluate a language model on tasks of lm-evaluation-harness.

    Args:
        source: a run directory, a checkpoint, a GGUF file, a Hugging Face folder, a safetensors
            file, or ``hf://org/name``.
        tasks: names of tasks, groups or tags.
        include: folder with task files of your own; they may have a name that the harness knows.
        limit: number of samples of each task, from its beginning; None = all.
        backend: kernel backend; None: that of the environment, of the run, or the best one.
        device: ``cpu``, ``cuda``, ``cuda:N`` or ``mps``; None: the run's own, or the CPU.

    Returns:
        Plain values. ``tasks`` has the metrics by task and by ``name,filter``, as the harness
        names them. A task that measures whole texts also has ``nats_per_token``.

    Raises:
        UsageProblem: there is no such model or task.
        DataError: a task cannot be read or computed.
    """
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    from arb_ternary_evals.adapter import HarnessModel

    if include is not None and not Path(include).is_dir():
        raise UsageProblem(f"include: {include}: there is no such folder")
    if not tasks:
        raise UsageProblem("tasks: no task is named", "arb eval SOURCE --tasks NAME,NAME")
    manager = TaskManager(include_path=None if include is None else str(include))
    for task in tasks:
        if task not in manager.all_tasks:
            close = nearest(task, manager.all_tasks)
            hint = f"did you mean {close!r}?" if close else "Name a folder of task files: --include"
            raise UsageProblem(f"tasks: there is no task {task!r}", hint)

    model = load_model(source, backend=backend, device=device)
    asked = HarnessModel(model)
    try:
        found = simple_evaluate(
            model=asked,
            tasks=list(tasks),
            limit=limit,
            log_samples=False,
            task_manager=manager,
        )
    except ArbError:
        raise
    except Exception as error:  # whatever a task file makes the harness raise
        named = f"{type(error).__name__}: {error}"
        raise DataError(f"tasks: {', '.join(tasks)}: {named}") from error
    assert found is not None  # it is None on the other ranks of several
    results = {name: _numbers(values) for name, values in found["results"].items()}
    for name, (nats, tokens) in asked.windows.items():
        if name in results and tokens:
            results[name]["nats_per_token"] = nats / tokens
    return {
        "source": str(source),
        "backend": model.backend,
        "lm_eval": version("lm-eval"),
        "limit": limit,
        "samples": {name: count["effective"] for name, count in found["n-samples"].items()},
        "notes": [*model.notes, *asked.notes],
        "tasks": results,
    }


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of a task without its name and without errors that are not known."""
    return {key: value for key, value in values.items() if isinstance(value, int | float)}
