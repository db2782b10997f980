"""Tasks of lm-evaluation-harness for tests: a tokenizer of bytes, task files, and no network.

Needs the extra ``tasks``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from arb_ternary_text.data.byte_level import BYTE_CHARACTERS
from arb_ternary_text.data.file_tokenizers import FileTokenizer
from arb_ternary_text.data.special_tokens import SpecialTokens
from arb_ternary_text.data.tokenizers import LanguageTokenizer


def byte_tokenizer(special: SpecialTokens) -> LanguageTokenizer:
    """Return a tokenizer whose ids are bytes; 256 and 257 are ``<s>`` and ``</s>``."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    library: Any = Tokenizer(models.BPE({c: i for i, c in enumerate(BYTE_CHARACTERS)}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken(text, special=True) for text in ("<s>", "</s>")])
    return LanguageTokenizer(FileTokenizer(library.to_str()), special)


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
