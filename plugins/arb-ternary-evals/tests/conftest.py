"""Task files, a tiny run, and no network."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from arb_ternary_text.data.byte_level import BYTE_CHARACTERS
from arb_ternary_text.data.file_tokenizers import FileTokenizer
from arb_ternary_text.data.special_tokens import SpecialTokens
from arb_ternary_text.data.tokenizers import LanguageTokenizer
from arb_ternary_train.loading import load_config
from arb_ternary_train.progress import Silent
from arb_ternary_train.runner import RunRequest, train

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
model: {{name: decoder, architecture: qwen3, activations: float, width: 32, layers: 2, heads: 2,
  feed_forward: 64, max_length: {context}{model}}}
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
    """No network; caches are in ``tmp_path``."""
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_HUB_DISABLE_TELEMETRY"):
        monkeypatch.setenv(name, "1")
    # Also those that the harness sets when it is imported.
    monkeypatch.setenv("HF_XET_HIGH_PERFORMANCE", "1")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")

    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def tokenizer(special: SpecialTokens) -> LanguageTokenizer:
    library = Tokenizer(models.BPE({c: i for i, c in enumerate(BYTE_CHARACTERS)}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken(text, special=True) for text in ("<s>", "</s>")])
    return LanguageTokenizer(FileTokenizer(library.to_str()), special)


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """Train for some steps; returns the run directory."""

    def make(special: SpecialTokens, context: int = CONTEXT, model: str = "") -> Path:
        (tmp_path / "text.txt").write_text("the cat sat on the mat. " * 60)
        (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer(special).to_json()))
        text = CONFIG.format(
            text=tmp_path / "text.txt",
            tokenizer=tmp_path / "tokenizer.json",
            context=context,
            model=model,
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

    def write(name: str, rows: list[Any], metrics: list[str], **options: Any) -> None:
        data = tmp_path / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        task = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(data)}},
            "test_split": "test",
            "metric_list": [{"metric": metric} for metric in metrics],
            **options,
        }
        # JSON is YAML.
        (folder / f"{name}.yaml").write_text(json.dumps(task))

    write(
        "choice",
        QUESTIONS,
        ["acc", "acc_norm"],
        output_type="multiple_choice",
        doc_to_text="{{question}}",
        doc_to_choice="choices",
        doc_to_target="answer",
        target_delimiter="",
    )
    write(
        "perplexity",
        [{"text": text} for text in TEXTS],
        ["byte_perplexity", "bits_per_byte"],
        output_type="loglikelihood_rolling",
        doc_to_text="",
        doc_to_target="{{text}}",
    )
    write(
        "answers",
        [{"text": "the cat", "right": " sat"}, {"text": "on the", "right": " mat"}],
        ["exact_match"],
        output_type="generate_until",
        doc_to_text="{{text}}",
        doc_to_target="{{right}}",
        generation_kwargs={"until": [".", "q"], "max_gen_toks": 12, "do_sample": False},
    )
    return folder
