"""Task files, a tiny run, and no network."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from arb_ternary_text.data.special_tokens import SpecialTokens
from arb_ternary_train.loading import load_config
from arb_ternary_train.progress import Silent
from arb_ternary_train.runner import RunRequest, train
from arb_test_support.byte_tokenizer import byte_tokenizer
from arb_test_support.language_tasks import (
    go_offline,
    write_choice_task,
    write_task,
)

BOS, EOS = 256, 257
CONTEXT = 48
QUESTIONS = [
    {"question": "the cat sat", "choices": [" on", " in a hat", " é"], "answer": 1},
    {"question": "who?", "choices": [" me", " you"], "answer": 0},
    {"question": "", "choices": ["yes", "no"], "answer": 1},
]
#: The first has more than one window, the second is shorter than one.
TEXTS = ["the cat sat on the mat and the dog in the fog, or on a log, twice", "a dog é"]

CONFIG = """
name: tiny
data: {{name: text, path: {text}, tokenizer: {tokenizer}, validation_fraction: 0.2}}
model: {{name: decoder, architecture: qwen3, activations: {activations}, width: {width}, layers: 2,
  heads: 2, feed_forward: {feed_forward}, max_length: {context}{model}}}
optimizer: {{name: scaled_votes, lr: 0.2}}
phases:
  - {{name: standard, steps: 8, batch_size: 4, block_size: 16, warmup_steps: 0, eval_every: 0}}
"""


@pytest.fixture(scope="session")
def kit() -> SimpleNamespace:
    """What the tests of this folder share."""
    return SimpleNamespace(BOS=BOS, EOS=EOS, CONTEXT=CONTEXT, QUESTIONS=QUESTIONS, TEXTS=TEXTS)


@pytest.fixture(autouse=True)
def _offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_offline(monkeypatch, tmp_path / "cache")


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """Train for some steps; returns the run directory."""

    def make(
        special: SpecialTokens,
        context: int = CONTEXT,
        model: str = "",
        activations: str = "float",
        tokenizer: str | None = None,
        width: int = 32,
        feed_forward: int = 64,
    ) -> Path:
        (tmp_path / "text.txt").write_text("\n".join([*TEXTS, "the cat sat on the mat. " * 60]))
        (tmp_path / "tokenizer.json").write_text(json.dumps(byte_tokenizer(special).to_json()))
        text = CONFIG.format(
            text=tmp_path / "text.txt",
            tokenizer=tokenizer or tmp_path / "tokenizer.json",
            context=context,
            model=model,
            activations=activations,
            width=width,
            feed_forward=feed_forward,
        )
        (tmp_path / "config.yaml").write_text(text)
        config = load_config(tmp_path / "config.yaml").config
        train(config, RunRequest(directory=tmp_path / "run", reporter=Silent))
        return tmp_path / "run"

    return make


@pytest.fixture
def run(make_run: Callable[..., Path]) -> Path:
    return make_run(SpecialTokens(bos=BOS, eos=(EOS,)))


@pytest.fixture
def task_files(tmp_path: Path) -> Path:
    """A folder with a task of each kind: ``choice``, ``perplexity`` and ``answers``."""
    folder = tmp_path / "tasks"
    folder.mkdir()

    write_choice_task(folder, QUESTIONS, ["acc", "acc_norm"])
    write_task(
        folder,
        "perplexity",
        [{"text": text} for text in TEXTS],
        ["byte_perplexity", "bits_per_byte"],
        output_type="loglikelihood_rolling",
        doc_to_text="",
        doc_to_target="{{text}}",
    )
    write_task(
        folder,
        "answers",
        [{"text": "the cat", "right": " sat"}, {"text": "on the", "right": " mat"}],
        ["exact_match"],
        output_type="generate_until",
        doc_to_text="{{text}}",
        doc_to_target="{{right}}",
        generation_kwargs={"until": [".", "q"], "max_gen_toks": 12, "do_sample": False},
    )
    return folder
