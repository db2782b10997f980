"""Tasks of lm-evaluation-harness for tests: task files, and no network."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest


def go_offline(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """Let the harness and its packages read local files only, and keep their caches in ``cache``.

    Call it before the harness is imported.
    """
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_HUB_DISABLE_TELEMETRY"):
        monkeypatch.setenv(name, "1")
    # Also those that the harness sets when it is imported.
    monkeypatch.setenv("HF_XET_HIGH_PERFORMANCE", "1")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")

    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)


def write_task(
    folder: Path, name: str, rows: Iterable[Any], metrics: Sequence[str], **options: Any
) -> None:
    """Write a task and its samples to ``folder``.

    Args:
        folder: has one task file per task; the samples lie in ``<name>.jsonl``.
        name: name of the task.
        rows: the samples.
        metrics: names of the harness.
        options: further keys of the task file.
    """
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    task = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "metric_list": [{"metric": metric} for metric in metrics],
        **options,
    }
    # JSON is YAML.
    (folder / f"{name}.yaml").write_text(json.dumps(task), encoding="utf-8")


def write_choice_task(folder: Path, rows: Iterable[Any], metrics: Sequence[str]) -> None:
    """Write the multiple-choice task ``choice``, as :func:`write_task` does.

    Args:
        folder: as there.
        rows: the samples, with ``question``, ``choices`` and ``answer``, an index.
        metrics: as there.
    """
    write_task(
        folder,
        "choice",
        rows,
        metrics,
        output_type="multiple_choice",
        doc_to_text="{{question}}",
        doc_to_choice="choices",
        doc_to_target="answer",
        target_delimiter="",
    )
