"""One task file, one number: ours, and that of the harness on the exported folder."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from functools import partial
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
from arb_ternary_evals.batches import Score, make_engine, score_all
from arb_ternary_text.data.special_tokens import SpecialTokens

BOS, EOS = 256, 257
CONTEXT = 48

# Warnings of the harness and its packages about their own code.
pytestmark = pytest.mark.filterwarnings("ignore")


def exported(run: Path, folder: Path) -> Path:
    """Export a run to ``folder`` as a Hugging Face folder in float32."""
    export = ["export", str(run), str(folder), "--format", "hf", "-o", "layout=dense"]
    assert main([*export, "-o", "dtype=float32"]) == 0
    return folder


def theirs(folder: Path, task_files: Path, tasks: list[str], **options: Any) -> dict[str, Any]:
    """Return what the harness gives for a folder with its model ``hf``."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    found = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(folder)},
        tasks=tasks,
        task_manager=TaskManager(include_path=str(task_files), include_defaults=False),
        device="cpu",
        batch_size=1,
        log_samples=True,
        bootstrap_iters=0,
        **options,
    )
    assert found is not None
    return dict(found)


def check_metrics(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for task, metrics in expected["results"].items():
        compared = 0
        for name, value in metrics.items():
            if isinstance(value, float):
                assert found["tasks"][task]["metrics"][name] == pytest.approx(value, rel=1e-4), name
                compared += 1
        assert compared


@pytest.mark.parametrize(
    "special",
    [
        SpecialTokens(bos=BOS, eos=(EOS,)),
        SpecialTokens(bos=BOS, eos=(EOS,), adds_bos=True),
        SpecialTokens(eos=(EOS,), pad=EOS),
    ],
    ids=["bos", "adds_bos", "eos"],
)
def test_numbers_are_those_of_the_exported_folder(
    make_run: Callable[..., Path],
    task_files: Path,
    tmp_path: Path,
    special: SpecialTokens,
) -> None:
    run = make_run(special)
    tasks = ["choice", "perplexity", "answers"]
    found = arb_ternary.evaluate_tasks(run, tasks, include=task_files)
    expected = theirs(exported(run, tmp_path / "exported"), task_files, tasks)
    check_metrics(found, expected)
    samples = {name: each["samples"] for name, each in found["tasks"].items()}
    assert samples == {"choice": 3, "perplexity": 2, "answers": 2}
    # Answers are drawn as text, so compare them as text too.
    texts = [each["resps"][0][0] for each in expected["samples"]["answers"]]
    assert drawn(load_model(run), ["the cat", "on the"]) == texts


#: Writes BOS itself, trims, and announces answers.
CHAT = (
    "{{ bos_token }}{% for message in messages %}[{{ message.role }}]{{ message.content | trim }}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
#: Does not trim, and knows no system message.
NO_SYSTEM = (
    "{% for message in messages %}{% if message.role == 'system' %}{{ raise_exception('no') }}"
    "{% endif %}[{{ message.role }}]{{ message.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "adds_bos", "options"),
    [
        (CHAT, True, {"num_fewshot": 1, "system_instruction": "be short"}),
        (CHAT, False, {"num_fewshot": 2, "fewshot_as_multiturn": False}),
        (NO_SYSTEM, True, {"system_instruction": "be short"}),
    ],
    ids=["turns", "one turn", "no system"],
)
def test_numbers_of_conversations_are_those_of_the_exported_folder(
    make_run: Callable[..., Path],
    task_files: Path,
    tmp_path: Path,
    template: str,
    adds_bos: bool,
    options: dict[str, Any],
) -> None:
    special = SpecialTokens(bos=BOS, eos=(EOS,), adds_bos=adds_bos, chat_template=template)
    run = make_run(special, context=200)
    for name in ("choice", "answers"):
        task = json.loads((task_files / f"{name}.yaml").read_text())
        task["task"] = f"{name}_begun"
        task["gen_prefix"] = "It is "
        (task_files / f"{name}_begun.yaml").write_text(json.dumps(task))
    tasks = ["choice", "answers", "choice_begun", "answers_begun"]
    options = {"apply_chat_template": True, **options}
    found = arb_ternary.evaluate_tasks(run, tasks, include=task_files, **options)
    expected = theirs(exported(run, tmp_path / "exported"), task_files, tasks, **options)
    check_metrics(found, expected)
    shots = {name: each["num_fewshot"] for name, each in found["tasks"].items()}
    assert shots == expected["n-shot"] == dict.fromkeys(tasks, options.get("num_fewshot", 0))
    # Metrics of three samples say little. These are the texts, ids and likelihoods.
    model = HarnessModel(load_model(run), chat=True)
    for task in tasks:
        for sample in expected["samples"][task]:
            for arguments, answer in zip(sample["arguments"], sample["resps"], strict=True):
                requests: Any = [Kit(args=arguments)]
                if task.startswith("answers"):
                    assert model.generate_until(requests) == [answer[0]]
                    continue
                (ours,) = model.loglikelihood(requests, disable_tqdm=True)
                assert ours == (pytest.approx(answer[0][0], rel=1e-4), answer[0][1])
    refused = any("System messages were left out" in note for note in found["notes"])
    assert refused == (template == NO_SYSTEM)


def test_a_task_that_wants_no_examples_gets_none(run: Path, task_files: Path) -> None:
    file = task_files / "choice.yaml"
    file.write_text(json.dumps({**json.loads(file.read_text()), "num_fewshot": 0}))
    found = arb_ternary.evaluate_tasks(run, ["choice"], include=task_files, num_fewshot=1)
    assert found["tasks"]["choice"]["num_fewshot"] == 0
    assert found["notes"] == ["choice has no examples: its file says so."]


def test_a_model_without_a_template_has_no_conversations(run: Path, task_files: Path) -> None:
    with pytest.raises(UsageProblem, match="has no chat template"):
        arb_ternary.evaluate_tasks(run, ["choice"], include=task_files, apply_chat_template=True)


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
    metrics = found["tasks"]["perplexity"]["metrics"]
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
    choices = kit.QUESTIONS[2]["choices"]
    scores = score(model, [([10], list(choice.encode())) for choice in choices])
    asked = HarnessModel(model)
    requests: Any = [Kit(args=("", choice)) for choice in choices]
    likelihoods = asked.loglikelihood(requests, disable_tqdm=True)
    assert likelihoods == [tuple(score) for score in scores]


def score(model: Model, pairs: Sequence[tuple[list[int], list[int]]]) -> list[Score]:
    return score_all(make_engine(model), pairs, CONTEXT)


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_common_beginnings_are_read_once(make_run: Callable[..., Path], backend: str) -> None:
    model = load_model(make_run(SpecialTokens(bos=BOS), activations="int8"), backend=backend)
    # A block has 32 positions.
    context = list(b"the cat sat on the mat and the dog")
    pairs = [(context, list(each)) for each in (b" on", b" in a hat", b"x", b"the")]
    pairs += [(list(b"the cat is"), list(b" on the")), (list(b"another"), list(b" on"))]
    engine = make_engine(model)
    scores = score_all(engine, pairs, CONTEXT)
    alone = [score(model, [pair])[0] for pair in pairs]
    for one, other in zip(scores, alone, strict=True):
        assert one.log_likelihood == pytest.approx(other.log_likelihood, rel=1e-4)
        assert one.greedy == other.greedy
    # The modules share "the cat " too, which is no whole block. The last id of the context predicts
    # the first one of the continuation, so it is read each time.
    common = {"cpu": 3 * 32, "torch": 3 * (len(context) - 1) + len(b"the cat ")}[backend]
    assert engine.load.reused == common
    ids = sum(len(context) + len(continuation) - 1 for context, continuation in pairs)
    assert engine.load.read == ids - common


def test_greedy_means_that_each_token_is_the_most_likely_one(run: Path) -> None:
    model = load_model(run)
    ids = [BOS, *b"the cat"]
    likely: list[int] = []
    for _ in range(4):
        likely.append(int(model.logits([*ids, *likely])[-1].argmax()))
    other = [*likely[:3], (likely[3] + 1) % 256]
    assert [each.greedy for each in score(model, [(ids, likely), (ids, other)])] == [True, False]


def test_a_long_context_loses_its_beginning(run: Path) -> None:
    model = load_model(run)
    context = list(b"the cat sat on the mat. " * 4)
    continuation = list(b"the dog")
    (found,) = score(model, [(context, continuation)])
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


def test_bits_per_byte_count_bytes_also_if_the_task_does_not(
    make_run: Callable[..., Path], task_files: Path, kit: Kit
) -> None:
    file = task_files / "perplexity.yaml"
    task = json.loads(file.read_text())
    task["metric_list"] = [{"metric": "word_perplexity"}]
    file.write_text(json.dumps(task))
    run = make_run(SpecialTokens(), tokenizer="characters")
    metrics = arb_ternary.evaluate_tasks(run, ["perplexity"], include=task_files)["tasks"]
    found = metrics["perplexity"]["metrics"]
    size = sum(len(text.encode()) for text in kit.TEXTS)
    tokens = sum(len(text) for text in kit.TEXTS)
    assert tokens < size
    nats = found["nats_per_token"] * tokens
    assert found["bits_per_byte,none"] == pytest.approx(nats / size / math.log(2), rel=1e-9)


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
    assert kept["choice"]["metrics"] == printed["tasks"]["choice"]["metrics"]
    assert kept["choice"]["samples"] == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "choise"], "did you mean 'choice'"),
        (["--tasks", ","], "no task is named"),
        (["--tasks", "choice", "--batches", "3"], "--limit N"),
        (["--limit", "3"], "--limit: is about tasks"),
        (["--apply-chat-template"], "--apply-chat-template: is about tasks"),
        (["--tasks", "choice", "--fewshot-in-question"], "Add --apply-chat-template"),
        (["--tasks", "choice", "--apply-chat-template"], "has no chat template"),
        (["--tasks", "xyzzy"], "answers, choice, perplexity"),
    ],
)
def test_the_command_explains_what_is_wrong(
    run: Path,
    task_files: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    import lm_eval.tasks

    # The harness's own 14,000 files take 13 seconds.
    own = partial(lm_eval.tasks.TaskManager, include_defaults=False)
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", own)
    include = ["--include", str(task_files)] if "--tasks" in arguments else []
    assert main(["eval", str(run), *include, *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not (run / "tasks.json").exists()


def test_results_are_in_the_card_and_in_the_report(
    run: Path, task_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refreshed: list[Path] = []
    monkeypatch.setattr(arb_ternary, "refresh_report", refreshed.append, raising=False)
    command = ["eval", str(run), "--include", str(task_files), "--tasks", "choice"]
    assert main([*command, "--limit", "2", "--num-fewshot", "1"]) == 0
    assert refreshed == [run]
    card = (exported(run, tmp_path / "exported") / "README.md").read_text()
    assert '"dataset": {"type": "choice", "name": "choice", "args": {"num_few_shot": 1' in card
    assert "| choice | 2 | 1 | acc |" in card
    kept = json.loads((run / "tasks.json").read_text())
    assert kept["choice"]["step"] == 8


def test_a_folder_without_task_files_is_refused(run: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageProblem, match="there is no task file in this folder"):
        arb_ternary.evaluate_tasks(run, ["choice"], include=tmp_path / "empty")


def test_samples_that_need_the_network_are_explained(run: Path, task_files: Path) -> None:
    file = task_files / "choice.yaml"
    task = json.loads(file.read_text())
    del task["dataset_kwargs"]
    file.write_text(json.dumps({**task, "dataset_path": "nobody/nothing"}))
    with pytest.raises(DataError, match="are on the Hugging Face hub, which cannot be reached"):
        arb_ternary.evaluate_tasks(run, ["choice"], include=task_files)


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
