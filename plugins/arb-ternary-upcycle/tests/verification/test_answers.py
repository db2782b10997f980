"""The check ``eval``, against one text at a time through a plain forward pass."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve

import arb_ternary
from arb_ternary.errors import DataError, EnvironmentProblem, UsageProblem
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_text.models.decoder import Decoder
from arb_ternary_text.models.generate import generate
from arb_ternary_upcycle.verification.answers import EvalCheck
from arb_ternary_upcycle.verification.config import EvalConfig
from arb_test_support.language_tasks import go_offline, write_task

Run = Callable[..., Any]


@pytest.fixture(autouse=True)
def _offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_offline(monkeypatch, tmp_path / "cache")


def write(path: Path, questions: Sequence[Any]) -> str:
    path.write_text("".join(f"{json.dumps(question)}\n" for question in questions))
    return str(path)


def chance(model: Decoder, prompt: str, text: str) -> float:
    """Return the log probability of ``text`` after ``prompt``, from one pass without padding."""
    ids = torch.tensor([list((prompt + text).encode())])
    with torch.no_grad():
        logs = torch.log_softmax(model.eval()(ids[:, :-1])[0].double(), dim=-1)
    return sum(float(logs[place - 1, ids[0, place]]) for place in range(len(prompt), ids.shape[1]))


def greedy(model: Decoder, prompt: str, count: int) -> str:
    ids = list(generate(model.eval(), list(prompt.encode()), max_new_tokens=count, temperature=0))
    return bytes(ids).decode("latin-1")


CHOICES = [
    {"prompt": "To be, or not", "choices": [" to be", " xyz", "?!"], "answer": 0},
    {"prompt": "Double, double", "choices": [" toil", " trouble and more of it"], "answer": 1},
    {"prompt": "Out", "choices": [", damned spot", " there", " of here"], "answer": 2},
]


def evaluated(tasks: str, context: Any, **options: Any) -> Any:
    options.setdefault("min_student_accuracy", 0.0)
    return EvalCheck(EvalConfig(tasks=tasks, **options)).check(context)


def test_choice_is_the_likeliest_continuation(
    run: Run, report: Any, teacher: Decoder, student: Decoder, tmp_path: Path
) -> None:
    context = run(student)
    state = torch.get_rng_state()
    result = evaluated(write(tmp_path / "tasks.jsonl", CHOICES), context)
    assert torch.equal(torch.get_rng_state(), state)
    right = {"teacher": 0, "student": 0}
    for question in CHOICES:
        for name, model in (("teacher", teacher), ("student", student)):
            scores = [chance(model, question["prompt"], choice) for choice in question["choices"]]
            right[name] += scores.index(max(scores)) == question["answer"]
    assert result.metrics["teacher_accuracy"] == pytest.approx(right["teacher"] / 3)
    assert result.metrics["student_accuracy"] == pytest.approx(right["student"] / 3)
    assert result.metrics["accuracy_drop"] == pytest.approx(
        (right["teacher"] - right["student"]) / 3
    )
    assert result.metrics["questions"] == 3
    said = report(context, "eval")["details"]["tasks"]
    assert said["student"]["choice"]["samples"] == 3


def test_exact_answer_is_the_greedy_text(run: Run, teacher: Decoder, tmp_path: Path) -> None:
    """Only printable bytes can be generated: others would not be characters."""
    with torch.no_grad():
        teacher.head.weight[:32] = 0
        teacher.head.weight[127:] = 0
    prompts = ["To be", "Macbeth does murder sleep", "a"]
    texts = [greedy(teacher, prompt, 5) for prompt in prompts]
    assert all(text.isprintable() for text in texts)
    wrong = texts[0][:-1] + ("x" if texts[0][-1] != "x" else "y")
    questions = [{"prompt": p, "answer": t} for p, t in zip(prompts, texts, strict=True)]
    tasks = write(tmp_path / "tasks.jsonl", [*questions, {"prompt": prompts[0], "answer": wrong}])
    result = evaluated(tasks, run(teacher), min_student_accuracy=0.75)
    assert result.metrics["student_accuracy"] == 0.75
    assert result.passed


def test_number_at_the_limit_passes(run: Run, student: Decoder, tmp_path: Path) -> None:
    tasks = write(tmp_path / "tasks.jsonl", CHOICES)
    context = run(student)
    base = evaluated(tasks, context).metrics
    for name, value, worse in (
        ("min_student_accuracy", base["student_accuracy"], base["student_accuracy"] + 0.01),
        ("max_accuracy_drop", base["accuracy_drop"], base["accuracy_drop"] - 0.01),
    ):
        at = evaluated(tasks, context, **{name: value})
        beyond = evaluated(tasks, context, **{name: worse})
        assert (at.passed, beyond.passed) == (True, False), name


def test_identical_models_answer_all_forms_equally(
    run: Run, teacher: Decoder, tmp_path: Path
) -> None:
    tasks = write(tmp_path / "tasks", [*CHOICES, {"prompt": "a", "answer": "b"}])
    result = evaluated(tasks, run(teacher), max_accuracy_drop=0.0)
    assert result.passed
    assert (result.metrics["accuracy_drop"], result.metrics["questions"]) == (0.0, 4)


def test_tasks_of_the_harness_are_named(run: Run, student: Decoder, tmp_path: Path) -> None:
    rows = [{"prompt": row["prompt"], "answer": row["choices"][0]} for row in CHOICES]
    kind = {"doc_to_text": "prompt", "doc_to_target": "answer", "output_type": "loglikelihood"}
    write_task(tmp_path, "mine", rows, ["acc"], **kind)
    write_task(tmp_path, "other", rows, ["perplexity"], **kind)
    options = {"include": tmp_path, "limit": 2}
    assert evaluated("mine", run(student), **options).metrics["questions"] == 2
    with pytest.raises(DataError, match="the task other has no share of right answers"):
        evaluated("mine,other", run(student), **options)


def test_the_package_of_the_harness_is_named(
    run: Run, student: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(arb_ternary, "__getattr__", absent)
    with pytest.raises(EnvironmentProblem, match=r"check eval: needs .* arb-ternary-evals"):
        evaluated("piqa", run(student))


def test_impossible_questions_are_refused(
    run: Run, student: Decoder, small: DecoderConfig, tmp_path: Path
) -> None:
    tasks = write(tmp_path / "t.jsonl", [{"prompt": "a", "answer": "b" * 65}])
    with pytest.raises(DataError, match="65 tokens, and the model reads 64"):
        evaluated(tasks, run(student))
    possible = write(tmp_path / "possible.jsonl", CHOICES)
    with pytest.raises(UsageProblem, match="causal"):
        evaluated(
            possible,
            run(Decoder(evolve(small, causal=False, architecture=None, sub_norms=False), 256)),
        )
    with pytest.raises(DataError, match="there is no tokenizer"):
        evaluated(tasks, run(student, data=Nameless()))
    with pytest.raises(
        ValueError, match="'min_student_accuracy' or 'max_accuracy_drop' must be given"
    ):
        EvalConfig(tasks=tasks)


class Nameless:
    name = "numbers"
