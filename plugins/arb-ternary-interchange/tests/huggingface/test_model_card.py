"""The card of an exported folder, with results of tasks, as the hub's own library reads it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from arb_ternary.errors import ArbError
from arb_ternary_interchange.huggingface.exporter import HfExporter
from arb_ternary_interchange.options import HfExportConfig
from arb_ternary_text.models.decoder import Decoder

Make = Callable[..., Decoder]


def record(step: int | None, **changes: Any) -> dict[str, Any]:
    return {
        "source": "runs/a",
        "step": step,
        "lm_eval": "0.4.13",
        "limit": None,
        "apply_chat_template": False,
        "samples": 20,
        "num_fewshot": 5,
        "metrics": {"acc,none": 0.25, "acc_stderr,none": 0.1, "exact_match,strict-match": 0.5},
        **changes,
    }


def write(model: Decoder, folder: Path, tasks: Any) -> HfExporter:
    exporter = HfExporter(HfExportConfig())
    metadata = {"name": "a-run", "step": 3, "model": {}, "versions": {}, "tasks": tasks}
    exporter.export(model, folder, metadata)
    assert exporter.unmapped(metadata) == (
        ()
        if "old" not in tasks
        else ("the card lacks results of old, which the run had at another step than 3",)
    )
    return exporter


def test_results_are_entries_of_the_model_index(tmp_path: Path, make_decoder: Make) -> None:
    tasks = {
        "quiz: a": record(3),
        "texts": record(
            3,
            limit=8,
            samples=8,
            num_fewshot=0,
            apply_chat_template=True,
            metrics={"nats_per_token": 1.5, "word_perplexity,none": float("inf")},
        ),
        "old": record(2),
    }
    write(make_decoder(architecture="llama"), tmp_path / "out", tasks)
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert card.data.model_name == "a-run"
    assert card.data.library_name == "transformers"
    results = card.data.eval_results
    assert results is not None
    found = [(each.dataset_type, each.metric_type, each.metric_value) for each in results]
    assert found == [
        ("quiz: a", "acc", 0.25),
        ("quiz: a", "exact_match", 0.5),
        ("texts", "nats_per_token", 1.5),
    ]
    assert results[0].metric_args == {"stderr": 0.1}
    assert results[0].dataset_args == {"num_few_shot": 5, "samples": 20, "chat_template": False}
    assert results[1].metric_name == "exact match (strict-match)"
    assert results[2].dataset_args is not None
    assert results[2].dataset_args["limit"] == 8
    assert results[0].source_name == "lm-evaluation-harness 0.4.13"
    assert "| quiz: a | 20 | 5 | acc | 0.2500 | 0.1000 |" in card.text
    assert "Asked in conversations of the chat template: texts." in card.text


def test_without_results_there_is_no_index(tmp_path: Path, make_decoder: Make) -> None:
    write(make_decoder(architecture="llama"), tmp_path / "out", {})
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert card.data.eval_results is None
    assert "Results" not in card.text


def test_damaged_results_are_named(tmp_path: Path, make_decoder: Make) -> None:
    with pytest.raises(ArbError, match=r"tasks.json: is no file of results: KeyError: 'samples'"):
        write(make_decoder(architecture="llama"), tmp_path / "out", {"a": {"metrics": {}}})
