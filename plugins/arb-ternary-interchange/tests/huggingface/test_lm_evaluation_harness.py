"""Exported folders in lm-evaluation-harness: its scores are those of the float model's logits."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from arb_ternary_text.data.special_tokens import SpecialTokens
from arb_ternary_text.models.decoder import Decoder
from arb_test_support.byte_tokenizer import byte_tokenizer
from arb_test_support.language_tasks import (
    go_offline,
    write_choice_task,
    write_task,
)

Make = Callable[..., Decoder]
Export = Callable[..., Path]

BOS, EOS = 256, 257
CONTEXT = 32
QUESTIONS = [
    {"question": "the cat sat", "choices": [" on", " in a hat", " é"], "answer": 1},
    {"question": "who?", "choices": [" me", " you"], "answer": 0},
    {"question": "", "choices": ["yes", "no"], "answer": 1},
]
#: The first has two windows and a half, the second is shorter than one.
TEXTS = ["the cat sat on the mat and the dog in the fog, or on a log, twice", "a dog é"]

pytestmark = [
    pytest.mark.usefixtures("eager"),
    # Warnings of the harness and its packages about their own code.
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture
def evaluate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Mapping[str, Any]]:
    """Evaluate a folder on the two tasks, without a network; caches are in ``tmp_path``."""
    go_offline(monkeypatch, tmp_path / "cache")

    import lm_eval
    from lm_eval.tasks import TaskManager

    folder = tmp_path / "tasks"
    folder.mkdir()
    write_choice_task(folder, QUESTIONS, ["acc"])
    write_task(
        folder,
        "perplexity",
        [{"text": text} for text in TEXTS],
        ["word_perplexity", "byte_perplexity", "bits_per_byte"],
        output_type="loglikelihood_rolling",
        doc_to_text="",
        doc_to_target="{{text}}",
    )

    def run(model: Path, **arguments: Any) -> Mapping[str, Any]:
        found = lm_eval.simple_evaluate(
            model="hf",
            model_args={"pretrained": str(model), **arguments},
            tasks=["choice", "perplexity"],
            task_manager=TaskManager(include_path=str(folder), include_defaults=False),
            device="cpu",
            batch_size=2,
            bootstrap_iters=0,
        )
        assert found is not None
        return found

    return run


def log_likelihood(model: Decoder, ids: list[int], counted: int) -> float:
    """Return the log-likelihood in nats of the last ``counted`` ids, from numpy."""
    with torch.no_grad():
        logits = model(torch.tensor([ids[:-1]]))[0].double().numpy()
    high = logits.max(-1, keepdims=True)
    scores = logits - high - np.log(np.exp(logits - high).sum(-1, keepdims=True))
    chosen = scores[np.arange(len(ids) - 1), ids[1:]]
    return float(chosen[-counted:].sum())


def rolling(model: Decoder, ids: list[int], prefix: int) -> float:
    """Return the log-likelihood of a text in windows. The first begins behind ``prefix``; the last
    is as long as the context, and only what no window before it has is counted.
    """
    total = log_likelihood(model, [prefix, *ids[:CONTEXT]], len(ids[:CONTEXT]))
    for start in range(CONTEXT, len(ids), CONTEXT):
        end = min(start + CONTEXT, len(ids))
        total += log_likelihood(model, ids[end - CONTEXT - 1 : end], end - start)
    return total


@pytest.mark.parametrize(
    ("special", "prefix", "arguments"),
    [
        (SpecialTokens(bos=BOS, eos=(EOS,)), BOS, {}),
        (SpecialTokens(bos=BOS, eos=(EOS,), adds_bos=True), BOS, {}),
        (SpecialTokens(eos=(EOS,), pad=EOS), EOS, {}),
        (SpecialTokens(), 10, {"prefix_token_id": 10}),
    ],
    ids=["bos", "adds_bos", "eos", "none"],
)
def test_choices_and_perplexities_are_those_of_our_logits(
    tmp_path: Path,
    make_decoder: Make,
    export: Export,
    as_float: Callable[[Decoder], Decoder],
    evaluate: Callable[..., Mapping[str, Any]],
    special: SpecialTokens,
    prefix: int,
    arguments: Mapping[str, Any],
) -> None:
    model = make_decoder(architecture="qwen3", vocabulary_size=258, max_length=CONTEXT)
    state = byte_tokenizer(special).to_json()
    folder = export(model, tmp_path / "out", state, layout="dense")
    assert ("prefix_token_id" in (folder / "README.md").read_text()) == bool(arguments)
    found = evaluate(folder, **arguments)
    ours = as_float(model)
    begin = [BOS] if special.adds_bos else []

    samples = sorted(found["samples"]["choice"], key=lambda sample: sample["doc_id"])
    right = 0
    for question, sample in zip(QUESTIONS, samples, strict=True):
        context = list(str(question["question"]).encode())
        ids = [*begin, *context] if context else [prefix]
        expected = [
            log_likelihood(ours, [*ids, *choice.encode()], len(choice.encode()))
            for choice in question["choices"]  # type: ignore[attr-defined]
        ]
        theirs = [response[0] for response in sample["filtered_resps"]]
        assert theirs == pytest.approx(expected, abs=1e-4)
        right += int(np.argmax(expected)) == question["answer"]
    assert found["results"]["choice"]["acc,none"] == right / len(QUESTIONS)

    total = sum(rolling(ours, [*begin, *text.encode()], prefix) for text in TEXTS)
    words = sum(len(text.split()) for text in TEXTS)
    size = sum(len(text.encode()) for text in TEXTS)
    results = found["results"]["perplexity"]
    assert math.log(results["word_perplexity,none"]) == pytest.approx(-total / words, rel=1e-5)
    assert math.log(results["byte_perplexity,none"]) == pytest.approx(-total / size, rel=1e-5)
    assert results["bits_per_byte,none"] == pytest.approx(-total / size / math.log(2), rel=1e-5)


@pytest.mark.parametrize("layout", ["packed", "dense_w1a8"])
def test_ternary_layouts_give_the_perplexity_of_int8(
    tmp_path: Path,
    make_decoder: Make,
    export: Export,
    evaluate: Callable[..., Mapping[str, Any]],
    layout: str,
) -> None:
    options = {"group_size": "tensor", "scale_rule": "frozen", "max_length": CONTEXT}
    model = make_decoder(architecture="llama", vocabulary_size=258, **options)
    state = byte_tokenizer(SpecialTokens(bos=BOS, eos=(EOS,))).to_json()
    folder = export(model, tmp_path / "out", state, layout=layout)
    results = evaluate(folder)["results"]["perplexity"]
    bits = -sum(rolling(model, list(text.encode()), BOS) for text in TEXTS) / math.log(2)
    size = sum(len(text.encode()) for text in TEXTS)
    assert results["bits_per_byte,none"] == pytest.approx(bits / size, rel=5e-3)
