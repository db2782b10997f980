"""reasoning.py: its questions, its runs, what it counts."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
from attrs import evolve

import reasoning
from arb_ternary.cli.main import main
from arb_ternary.config.yaml_document import read_yaml
from arb_ternary.errors import ArbError, EnvironmentProblem, UsageProblem
from harness.child import Ended
from reasoning import METHODS, TABLE, ReasoningOptions, base_conversations, draw_questions

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
        assert (name, settings) == (reasoning.DATASET, reasoning.SETTINGS)
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

    def run(arguments: Sequence[str], _log: Path, *, threads: int) -> Ended:
        started.append(list(arguments))
        assert main(list(arguments)) == 0
        return Ended(0, 0)

    def in_turn(call: Any, items: Any, jobs: int) -> list[Any]:
        return [call(item) for item in items]

    monkeypatch.setattr(reasoning, "run_arb", run)
    # Runs within this process take signals, which only its main thread may do.
    monkeypatch.setattr(reasoning, "in_parallel", in_turn)
    return started


@pytest.mark.usefixtures("fake_gym")
def test_both_methods_learn_the_same_batches_and_are_scored(
    commands: list[list[str]], tmp_path: Path
) -> None:
    result = reasoning.run(OPTIONS, tmp_path)
    result["options"] = attrs.asdict(OPTIONS)
    assert [arguments[0] for arguments in commands] == [
        "data",
        *["train"] * 4,  # chat models
        *["finetune"] * 2,  # seed 0, rates of votes
        "train",  # seed 0, the rate of QAT
        "finetune",  # seed 1
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
    assert [row[0] for row in TABLE.rows(result)] == [each.label for each in METHODS.values()]
    assert "4 others measure" in TABLE.markdown(result)

    # Everything is there already; other options need another folder.
    commands.clear()
    assert reasoning.run(OPTIONS, tmp_path)["methods"] == result["methods"]
    assert commands == []
    with pytest.raises(UsageProblem, match="other options are in use here"):
        reasoning.run(evolve(OPTIONS, width=24), tmp_path)


@pytest.mark.usefixtures("fake_gym")
def test_questions_of_all_parts_differ() -> None:
    questions = draw_questions(OPTIONS)
    parts = (questions.test, questions.choice, questions.train)
    asked = [entry["question"] for part in parts for entry in part]
    assert len(set(asked)) == len(asked)
    assert (len(questions.test), len(questions.choice)) == (4, 2)
    with pytest.raises(ArbError, match="100 different questions instead of 200"):
        draw_questions(evolve(OPTIONS, test_questions=200))


def test_the_chat_model_is_taught_no_sum() -> None:
    pairs = base_conversations(200)
    assert not any(character in asked for asked, _ in pairs for character in "+-=")
    assert {asked.split()[0] for asked, _ in pairs} == {"Count", "Repeat", "Which"}


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(EnvironmentProblem, match="the package reasoning-gym is needed") as caught:
        draw_questions(OPTIONS)
    assert caught.value.hint == "pip install reasoning-gym"
