"""One task file, one number: ours, and that of the harness on the exported folder."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace as Kit
from typing import Any

import numpy as np
import pytest
import torch

import arb_ternary
from arb_ternary.cli.main import main
from arb_ternary.errors import DataError, UsageProblem
from arb_ternary_chat.model import Model, load_model
from arb_ternary_evals.adapter import HarnessModel
from arb_ternary_evals.scoring import Scorer
from arb_ternary_text.data.special_tokens import SpecialTokens

BOS, EOS = 256, 257
CONTEXT = 48

# Warnings of the harness and its packages about their own code.
pytestmark = pytest.mark.filterwarnings("ignore")


def theirs(folder: Path, task_files: Path, **arguments: Any) -> dict[str, Any]:
    """Return what the harness gives for a folder with its model ``hf``."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    found = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(folder), **arguments},
        tasks=["choice", "perplexity", "answers"],
        task_manager=TaskManager(include_path=str(task_files), include_defaults=False),
        device="cpu",
        batch_size=1,
        log_samples=True,
    )
    assert found is not None
    return dict(found)


@pytest.mark.parametrize(
    ("special", "arguments"),
    [
        (SpecialTokens(bos=BOS, eos=(EOS,)), {}),
        (SpecialTokens(bos=BOS, eos=(EOS,), adds_bos=True), {}),
        (SpecialTokens(eos=(EOS,), pad=EOS), {}),
    ],
    ids=["bos", "adds_bos", "eos"],
)
def test_numbers_are_those_of_the_exported_folder(
    make_run: Callable[..., Path],
    task_files: Path,
    tmp_path: Path,
    special: SpecialTokens,
    arguments: dict[str, Any],
) -> None:
    run = make_run(special)
    found = arb_ternary.evaluate_tasks(run, ["choice", "perplexity", "answers"], include=task_files)
    folder = tmp_path / "exported"
    export = ["export", str(run), str(folder), "--format", "hf", "-o", "layout=dense"]
    assert main([*export, "-o", "dtype=float32"]) == 0
    expected = theirs(folder, task_files, **arguments)
    for task, metrics in expected["results"].items():
        for name, value in metrics.items():
            if isinstance(value, float):
                assert found["tasks"][task][name] == pytest.approx(value, rel=1e-4), name
    assert found["samples"] == {"choice": 3, "perplexity": 2, "answers": 2}
    # Answers are drawn as text, so compare them as text too.
    texts = [each["resps"][0][0] for each in expected["samples"]["answers"]]
    assert drawn(load_model(run), ["the cat", "on the"]) == texts


def drawn(model: Model, prompts: Sequence[str], **options: Any) -> list[str]:
    asked = {"until": [".", "q"], "max_gen_toks": 12, **options}
    requests: Any = [Kit(args=(prompt, asked)) for prompt in prompts]
    return HarnessModel(model).generate_until(requests)


def test_nats_per_token_are_those_of_logits(run: Path, task_files: Path, kit: Kit) -> None:
    found = arb_ternary.evaluate_tasks(run, ["perplexity"], include=task_files)
    model = load_model(run)
    total = 0.0
    count = 0
    for text in kit.TEXTS:
        ids = list(text.encode())
        read = [BOS, *ids]
        for start in range(0, len(ids), CONTEXT):
            end = min(start + CONTEXT, len(ids))
            first = 0 if start == 0 else end - CONTEXT
            logits = model.logits(read[first:end]).double().numpy()
            high = logits.max(-1, keepdims=True)
            scores = logits - high - np.log(np.exp(logits - high).sum(-1, keepdims=True))
            targets = read[first + 1 : end + 1]
            total -= scores[np.arange(len(targets)), targets][start - end :].sum()
        count += len(ids)
    metrics = found["tasks"]["perplexity"]
    assert metrics["nats_per_token"] == pytest.approx(total / count, rel=1e-5)
    # A token is a byte here.
    assert metrics["bits_per_byte,none"] == pytest.approx(total / count / math.log(2), rel=1e-5)


def test_a_newline_stands_before_texts_without_another_beginning(
    make_run: Callable[..., Path], task_files: Path, kit: Kit
) -> None:
    run = make_run(SpecialTokens())
    tasks = ["choice", "perplexity"]
    found = arb_ternary.evaluate_tasks(run, tasks, include=task_files)
    assert any("newline stands before each text" in note for note in found["notes"])
    model = load_model(run)
    chosen = Scorer(model.causal, model.device)
    choices = kit.QUESTIONS[2]["choices"]
    scores = [chosen.score([10], list(choice.encode())) for choice in choices]
    asked = HarnessModel(model)
    requests: Any = [Kit(args=("", choice)) for choice in choices]
    likelihoods = asked.loglikelihood(requests, disable_tqdm=True)
    assert likelihoods == [tuple(score) for score in scores]


def test_common_beginnings_are_read_once(run: Path) -> None:
    opened = load_model(run)
    read: list[int] = []
    module = opened.module
    module.register_forward_pre_hook(lambda _, args: read.append(args[0].numel()))
    scorer = Scorer(opened.causal, opened.device)
    context = list(b"the cat sat on the mat")
    pairs = [(context, list(each)) for each in (b" on", b" in a hat", b"x", b"the")]
    pairs += [(list(b"the cat is"), list(b" on the")), (list(b"another"), list(b" on"))]
    scores = [scorer.score(*pair) for pair in pairs]
    together = sum(read)
    read.clear()
    alone = [Scorer(opened.causal, opened.device).score(*pair) for pair in pairs]
    for one, other in zip(scores, alone, strict=True):
        assert one.log_likelihood == pytest.approx(other.log_likelihood, rel=1e-5)
        assert one.greedy == other.greedy
    # Behind the last token of the context, a continuation of n tokens is n positions. The context
    # is read once, and "the cat " is common to the fifth pair.
    lengths = [len(continuation) for _, continuation in pairs]
    rest = [len(context) - 1, len(b"the cat is") - 1 - len(b"the cat "), len(b"another") - 1]
    assert together == sum(lengths) + sum(rest)
    assert sum(read) > 2 * together


def test_greedy_means_that_each_token_is_the_most_likely_one(run: Path) -> None:
    model = load_model(run)
    scorer = Scorer(model.causal, model.device)
    ids = [BOS, *b"the cat"]
    likely: list[int] = []
    for _ in range(4):
        likely.append(int(model.logits([*ids, *likely])[-1].argmax()))
    assert scorer.score(ids, likely).greedy
    assert not scorer.score(ids, [*likely[:3], (likely[3] + 1) % 256]).greedy


def test_a_long_context_loses_its_beginning(run: Path) -> None:
    model = load_model(run)
    context = list(b"the cat sat on the mat. " * 4)
    continuation = list(b"the dog")
    found = Scorer(model.causal, model.device).score(context, continuation)
    read = [*context, *continuation][-CONTEXT - 1 :]
    logits = model.logits(read[:-1]).double().log_softmax(-1)[-len(continuation) :]
    expected = logits.gather(-1, torch.tensor(continuation)[:, None]).sum()
    assert found.log_likelihood == pytest.approx(float(expected), rel=1e-5)


def test_what_a_task_cannot_have_is_refused(run: Path) -> None:
    model = load_model(run)
    requests: Any = [Kit(args=("the", " cat" * 13))]
    with pytest.raises(DataError, match="52 tokens, and the model reads 48"):
        HarnessModel(model).loglikelihood(requests, disable_tqdm=True)
    with pytest.raises(UsageProblem, match="num_beams"):
        drawn(model, ["the"], num_beams=4)
    with pytest.raises(UsageProblem, match="48 tokens of an answer leave no room"):
        drawn(model, ["the"], max_gen_toks=48)


def test_the_command_prints_and_keeps_results(
    run: Path, task_files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["eval", str(run), "--include", str(task_files)]
    assert main([*command, "--tasks", "choice", "--limit", "2"]) == 0
    shown = capsys.readouterr().out
    assert "choice" in shown
    assert "acc norm" in shown
    assert main([*command, "--tasks", "perplexity,choice", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["limit"] is None
    kept = json.loads((run / "tasks.json").read_text())
    assert kept.keys() == {"choice", "perplexity"}
    assert kept["choice"]["metrics"] == printed["tasks"]["choice"]
    assert kept["choice"]["samples"] == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "choise"], "did you mean 'choice'"),
        (["--tasks", ","], "no task is named"),
        (["--tasks", "choice", "--batches", "3"], "--limit N"),
        (["--limit", "3"], "--tasks NAME"),
    ],
)
def test_the_command_explains_what_is_wrong(
    run: Path,
    task_files: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    assert main(["eval", str(run), "--include", str(task_files), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not (run / "tasks.json").exists()


def test_a_damaged_file_of_results_is_kept(run: Path, task_files: Path) -> None:
    (run / "tasks.json").write_text("{")
    command = ["eval", str(run), "--include", str(task_files), "--tasks", "choice"]
    assert main(command) != 0
    assert (run / "tasks.json").read_text() == "{"


def test_a_task_file_that_fails_is_named(run: Path, task_files: Path) -> None:
    file = task_files / "choice.yaml"
    task = json.loads(file.read_text())
    task["dataset_kwargs"]["data_files"]["test"] = "no-such-file.jsonl"
    file.write_text(json.dumps(task))
    with pytest.raises(DataError, match=r"tasks: choice: .*no-such-file"):
        arb_ternary.evaluate_tasks(run, ["choice"], include=task_files)
