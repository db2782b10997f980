"""``arb push`` of a run that began from another model and has results of tasks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from arb_ternary.cli.main import main
from arb_ternary_text.data.special_tokens import SpecialTokens
from arb_ternary_train.loading import load_config
from arb_ternary_train.progress import Silent
from arb_ternary_train.runner import RunRequest, train
from arb_test_support.byte_tokenizer import byte_tokenizer
from arb_test_support.language_tasks import go_offline, write_choice_task

pytest.importorskip("lm_eval")

CONFIG = """
name: NAME
data: {name: text, path: text.txt, tokenizer: tokenizer.json, validation_fraction: 0.2}
model: {name: decoder, architecture: qwen3, width: 32, layers: 1, heads: 2, feed_forward: 64,
  max_length: 48}
optimizer: {name: scaled_votes, lr: 0.2}
phases:
  - {name: standard, steps: 4, batch_size: 4, block_size: 16, warmup_steps: 0, eval_every: 0}
"""
ROWS = [
    {"question": "the cat sat", "choices": [" on", " in a hat"], "answer": 1},
    {"question": "who?", "choices": [" me", " you"], "answer": 0},
]


def run_of(name: str, **request: Any) -> Path:
    """Train in the current folder; return the run."""
    file = Path(f"{name}.yaml")
    file.write_text(CONFIG.replace("NAME", name), encoding="utf-8")
    train(load_config(file).config, RunRequest(directory=Path(name), reporter=Silent, **request))
    return Path(name)


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a folder with a text, a tokenizer and a task."""
    go_offline(monkeypatch, tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("the cat sat on the mat. " * 80, encoding="utf-8")
    tokenizer = byte_tokenizer(SpecialTokens(bos=256, eos=(257,)))
    Path("tokenizer.json").write_text(json.dumps(tokenizer.to_json()), encoding="utf-8")
    Path("tasks").mkdir()
    write_choice_task(Path("tasks").resolve(), ROWS, ["acc"])


def check_card(source: str, base: str) -> None:
    """Evaluate and push; compare the card, as the hub's library reads it, with the results."""
    assert main(["eval", source, "--include", "tasks", "--tasks", "choice"]) == 0
    command = ["push", source, "org/small", "--dry-run", "out"]
    assert main([*command, "--base-model", base, "--license", "mit"]) == 0
    card = ModelCard.load("out/README.md")
    assert (card.data.base_model, card.data.license) == (base, "mit")
    assert card.data.pipeline_tag == "text-generation"
    kept = json.loads((Path(source) / "tasks.json").read_text(encoding="utf-8"))["choice"]
    results = card.data.eval_results
    assert results is not None
    found = {each.metric_type: each for each in results}
    assert found["acc"].dataset_name == "choice"
    assert found["acc"].metric_value == kept["metrics"]["acc,none"]
    assert found["acc"].source_url == "https://github.com/EleutherAI/lm-evaluation-harness"
    # The table that the hub makes of them, and that of a reader of the file.
    assert card.data.model_name is not None
    assert f"| choice | 2 | 0 | acc | {kept['metrics']['acc,none']:.4f} |" in card.text


def test_a_run_that_began_from_an_imported_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(run_of("first")), "folder", "--format", "hf"]) == 0
    assert main(["import", "folder", "imported"]) == 0
    run_of("tuned", init_from=Path("imported"))
    check_card("tuned", "org/big")
    capsys.readouterr()
    assert main(["push", "tuned", "org/small", "--dry-run", "other"]) == 0
    assert "began as imported, and the card names no base model" in capsys.readouterr().err
    assert main(["push", "first", "org/small", "--dry-run", "another"]) == 0
    assert "base model" not in capsys.readouterr().err


def test_an_upcycled_run() -> None:
    assert main(["export", str(run_of("first")), "folder", "--format", "hf"]) == 0
    upcycle = ["upcycle", "folder", "--out", "small", "--blockwise-steps", "0", "--steps", "0"]
    upcycle += ["--block-size", "32", "-o", "phases.0.max_nll=100", "-o", "checks=[]"]
    assert main([*upcycle, "-o", "phases.2.calibration_tokens=256"]) == 0
    check_card("small/run", "first/folder")
