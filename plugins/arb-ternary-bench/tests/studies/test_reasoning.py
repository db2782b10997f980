"""The study ``reasoning``: its questions, its runs, what it counts."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
from attrs import evolve

from arb_ternary.cli.main import main
from arb_ternary.config.yaml_document import read_yaml
from arb_ternary.errors import ArbError, EnvironmentProblem, Interrupted, UsageProblem
from arb_ternary_bench.studies import reasoning
from arb_ternary_bench.studies.reasoning import (
    TABLE,
    TASKS,
    ReasoningOptions,
    base_conversations,
    draw_questions,
)
from arb_ternary_bench.study import Session

OPTIONS = ReasoningOptions(
    seeds=2,
    width=16,
    base_steps=2,
    steps=2,
    base_questions=40,
    train_questions=60,
    choice_questions=2,
    test_questions=4,
    votes_rates=(0.05, 0.1),
    qat_rates=(0.004,),
    jobs=1,
)


class Sums(Sequence[dict[str, str]]):
    """Stands for a dataset of reasoning-gym: an entry depends on the seed plus its index."""

    def __init__(self, name: str, *, seed: int, size: int, **settings: Any) -> None:
        assert (name, settings) in TASKS.values()
        self.seeds = range(seed, seed + size)

    def __len__(self) -> int:
        return len(self.seeds)

    def __getitem__(self, index: Any) -> Any:
        first, second = divmod(random.Random(self.seeds[index]).randrange(100), 10)
        return {"question": f"State: {first} + {second} =", "answer": str(first + second)}

    def score_answer(self, answer: str, entry: dict[str, str]) -> float:
        return 1.0 if answer == entry["answer"] else 0.25


@pytest.fixture
def fake_gym(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", SimpleNamespace(create_dataset=Sums))
    monkeypatch.setattr(reasoning, "version", lambda _: "0.0")


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Runs ``arb`` in this process; returns the commands."""
    started: list[list[str]] = []

    def run(arguments: Sequence[str], _log: Path) -> int:
        started.append(list(arguments))
        return main(list(arguments))

    monkeypatch.setattr(reasoning, "run_arb", run)
    return started


def all_different(*parts: Sequence[Any]) -> bool:
    asked = [entry["question"] for part in parts for entry in part]
    return len(set(asked)) == len(asked)


@pytest.mark.usefixtures("fake_gym")
def test_both_methods_learn_the_same_batches_and_are_scored(
    commands: list[list[str]], tmp_path: Path
) -> None:
    result = reasoning.run(OPTIONS, Session(tmp_path))
    result["options"] = attrs.asdict(OPTIONS)
    assert [arguments[0] for arguments in commands] == [
        "data",
        *["train"] * 2,  # chat models of seed 0
        *["finetune"] * 2,
        "train",
        *["train"] * 2,  # chat models of seed 1
        "finetune",
        "train",
    ]
    votes_config, qat_config = (
        read_yaml((tmp_path / file).read_text(), file).data
        for file in ("votes-0/tuned-0.05/config.yaml", "qat-0/tuned-0.004/run.yaml")
    )
    for key in ("data", "masking", "seed"):
        assert votes_config[key] == qat_config[key]
    assert qat_config["phases"] == [{**votes_config["phases"][0], "grad_clip": 1.0}]
    votes, qat = result["methods"]
    assert votes["rate"] in OPTIONS.votes_rates
    assert votes["learned_tokens"] == qat["learned_tokens"] > 0
    assert votes["float_parameters"] == 0
    assert 0 < qat["parameters"] == qat["float_parameters"]
    assert votes["state_bits_per_parameter"] < 16
    assert qat["state_bits_per_parameter"] == pytest.approx(96, abs=0.1)
    for row in (votes, qat):
        for each in (*row["before"], *row["after"]):
            # Four answers, and a quarter for each that is wrong.
            assert each["mean"] == pytest.approx(0.25 + 0.75 * each["accuracy"])
    assert [row[0] for row in TABLE.rows(result)] == list(reasoning.LABELS.values())
    assert "4 others measure" in TABLE.markdown(result)

    # Everything is there already; another size is another study.
    commands.clear()
    assert reasoning.run(OPTIONS, Session(tmp_path))["methods"] == result["methods"]
    assert commands == []
    with pytest.raises(UsageProblem, match="a study with other settings"):
        reasoning.run(evolve(OPTIONS, width=24), Session(tmp_path))


@pytest.mark.usefixtures("fake_gym")
@pytest.mark.parametrize(
    ("signalled", "error", "message"),
    [(False, ArbError, "tokenizer: arb data ended with 3"), (True, Interrupted, "by SIGTERM")],
)
def test_a_failure_and_a_signal_end_the_study(
    signalled: bool,
    error: type[ArbError],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    def fail(_arguments: Sequence[str], log: Path) -> int:
        log.write_text("error: no room\n")
        if signalled:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.2)  # the main thread takes note of it
        return 3

    monkeypatch.setattr(reasoning, "run_arb", fail)
    said: list[str] = []
    with pytest.raises(error, match=message) as caught:
        reasoning.run(OPTIONS, Session(tmp_path, said.append))
    assert caught.value.hint == (
        "The same command continues the study." if signalled else "error: no room"
    )
    assert said == []


@pytest.mark.usefixtures("fake_gym")
def test_questions_of_all_parts_differ() -> None:
    questions = draw_questions(OPTIONS)
    assert all_different(questions.test, questions.choice, questions.train)
    assert (len(questions.test), len(questions.choice)) == (4, 2)
    with pytest.raises(ArbError, match="100 different questions instead of 200"):
        draw_questions(evolve(OPTIONS, test_questions=200))


def test_the_chat_model_is_taught_no_sum() -> None:
    pairs = base_conversations(200)
    assert not any(character in asked for asked, _ in pairs for character in "+-=")
    assert {asked.split()[0] for asked, _ in pairs} == {"Count", "Repeat", "Which"}


def test_a_missing_package_and_an_unknown_task_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(EnvironmentProblem, match="needs the package reasoning-gym") as caught:
        draw_questions(OPTIONS)
    assert caught.value.hint == "pip install reasoning-gym"
    with pytest.raises(UsageProblem, match="there is no task 'sums'"):
        draw_questions(evolve(OPTIONS, task="sums"))


@pytest.mark.parametrize("task", TASKS)
def test_the_scorer_of_the_task_knows_its_answers(task: str) -> None:
    pytest.importorskip("reasoning_gym")
    questions = draw_questions(evolve(OPTIONS, task=task))
    assert all_different(questions.test, questions.choice, questions.train)
    for entry in questions.test:
        assert questions.dataset.score_answer(entry["answer"], entry) == 1
        assert questions.dataset.score_answer("none", entry) < 1
