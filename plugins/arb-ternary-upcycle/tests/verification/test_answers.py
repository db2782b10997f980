"""The check ``eval``, against one text at a time through a plain forward pass."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve

from arb_ternary.errors import ConfigError, DataError
from arb_ternary_text.data.shakespeare import load_text
from arb_ternary_text.data.tokenizers import ByteTokenizer
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_text.models.decoder import Decoder
from arb_ternary_text.models.generate import generate
from arb_ternary_upcycle.verification.answers import EvalCheck, answer
from arb_ternary_upcycle.verification.config import EvalConfig
from arb_ternary_upcycle.verification.questions import built_in_questions, read_questions

Run = Callable[..., Any]


def write(path: Path, questions: Sequence[Any]) -> Path:
    path.write_text("".join(f"{json.dumps(question)}\n" for question in questions))
    return path


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


def test_choice_is_the_likeliest_continuation(
    run: Run, report: Any, teacher: Decoder, student: Decoder, tmp_path: Path
) -> None:
    tasks = write(tmp_path / "tasks.jsonl", CHOICES)
    context = run(student)
    result = EvalCheck(EvalConfig(tasks=tasks, min_student_accuracy=0.0, batch_size=3)).check(
        context
    )
    said = report(context, "eval")["details"]["answers"]
    right = {"teacher": 0, "student": 0}
    for question, answers in zip(CHOICES, said, strict=True):
        for name, model in (("teacher", teacher), ("student", student)):
            scores = [chance(model, question["prompt"], choice) for choice in question["choices"]]
            assert answers[name] == scores.index(max(scores))
            right[name] += answers[name] == question["answer"]
    assert result.metrics["teacher_accuracy"] == right["teacher"] / 3
    assert result.metrics["student_accuracy"] == right["student"] / 3
    assert result.metrics["accuracy_drop"] == pytest.approx(
        (right["teacher"] - right["student"]) / 3
    )


def test_exact_answer_is_the_greedy_text(
    run: Run, report: Any, teacher: Decoder, tmp_path: Path
) -> None:
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
    result = EvalCheck(EvalConfig(tasks=tasks, min_student_accuracy=0.75)).check(
        context := run(teacher)
    )
    assert result.metrics["student_accuracy"] == 0.75
    assert [each["student"] for each in report(context, "eval")["details"]["answers"]] == [
        0,
        0,
        0,
        -1,
    ]
    assert result.passed


def test_number_at_the_limit_passes(run: Run, student: Decoder, tmp_path: Path) -> None:
    tasks = write(tmp_path / "tasks.jsonl", CHOICES)
    context = run(student)
    base = EvalCheck(EvalConfig(tasks=tasks, min_student_accuracy=0.0)).check(context).metrics
    for name, value, worse in (
        ("min_student_accuracy", base["student_accuracy"], base["student_accuracy"] + 0.01),
        ("max_accuracy_drop", base["accuracy_drop"], base["accuracy_drop"] - 0.01),
    ):
        at = EvalCheck(EvalConfig(tasks=tasks, **{name: value})).check(context)
        beyond = EvalCheck(EvalConfig(tasks=tasks, **{name: worse})).check(context)
        assert (at.passed, beyond.passed) == (True, False), name


def test_identical_models_give_equal_answers(run: Run, teacher: Decoder) -> None:
    result = EvalCheck(EvalConfig(max_accuracy_drop=0.0)).check(run(teacher))
    assert result.passed
    assert result.metrics["accuracy_drop"] == 0.0
    assert result.metrics["questions"] == 48


def test_built_in_questions_are_from_the_validation_text() -> None:
    text = load_text("validation")
    questions = built_in_questions()
    chosen = [question for question in questions if question.by_choice]
    assert (len(chosen), len(questions)) == (32, 48)
    for question in chosen:
        goes_on = [choice for choice in question.choices if question.prompt + choice in text]
        assert goes_on == [question.choices[question.right]]
        assert len(set(question.choices)) == 4
        assert all(40 <= len(choice) < 80 and choice[0] == " " for choice in question.choices)
    assert {question.right for question in chosen} == {0, 1, 2, 3}
    for question in questions[32:]:
        first, second, third = question.prompt.split("\n")
        assert first == second == third + question.choices[0]
        assert first in text
        assert question.choices[0].count(" ") == 1
    assert len({question.prompt for question in questions}) == 48


class Said:
    """A tokenizer that joins a space to the word after it, as those of models do."""

    vocabulary_size = 256

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for word in text.replace(" ", "\0 ").split("\0"):
            ids += [200] if word == " to" else list(word.encode())
        return ids


def test_continuation_starts_where_prompt_tokens_end(
    run: Run, student: Decoder, tmp_path: Path
) -> None:
    """The continuation `` to`` is one token, so its score is that of one prediction."""
    from arb_ternary_upcycle.verification.pair import open_pair

    tasks = write(tmp_path / "t.jsonl", [{"prompt": "be", "choices": [" to", " at"], "answer": 0}])
    pair = open_pair(run(student), None)
    answers = answer(pair, Said(), read_questions(tasks), batch_size=2)  # type: ignore[arg-type]
    with torch.no_grad():
        logs = torch.log_softmax(student.eval()(torch.tensor([[98, 101]]))[0, -1].double(), dim=-1)
    wanted = 0 if float(logs[200]) > chance(student, "be", " at") else 1
    assert answers[1] == [wanted]


def test_long_prompts_lose_their_beginnings(
    run: Run, small: DecoderConfig, student: Decoder, tmp_path: Path
) -> None:
    text = load_text("validation")[1000:1200]
    tasks = write(
        tmp_path / "t.jsonl", [{"prompt": text, "choices": [" alpha", " beta"], "answer": 0}]
    )
    context = run(student)
    said = (
        EvalCheck(EvalConfig(tasks=tasks, min_student_accuracy=0.0))
        .check(context)
        .metrics["student_accuracy"]
    )
    scores = [chance(student, text[-(65 - len(c)) :], c) for c in (" alpha", " beta")]
    assert said == float(scores[0] > scores[1])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"tasks.jsonl:2: not JSON"),
        ("[]", "prompt and answer, and may have choices"),
        ('{"prompt": "a", "answer": "b", "anwser": 1}', "prompt and answer, and may have choices"),
        ('{"prompt": "", "answer": "b"}', "prompt must be a text that is not empty"),
        ('{"prompt": "a", "answer": ""}', "answer must be a text that is not empty"),
        ('{"prompt": "a", "answer": 3}', "answer must be a text that is not empty"),
        (
            '{"prompt": "a", "choices": ["b"], "answer": 0}',
            "choices must be two or more different texts",
        ),
        (
            '{"prompt": "a", "choices": ["b", "b"], "answer": 0}',
            "choices must be two or more different texts",
        ),
        ('{"prompt": "a", "choices": ["b", 1], "answer": 0}', "choices must be texts"),
        (
            '{"prompt": "a", "choices": ["b", "c"], "answer": 2}',
            "answer must be the number of a choice, from 0 to 1",
        ),
        (
            '{"prompt": "a", "choices": ["b", "c"], "answer": true}',
            "answer must be the number of a choice",
        ),
        (
            '{"prompt": "a", "choices": "bc", "answer": 0}',
            "choices must be two or more different texts",
        ),
    ],
)
def test_invalid_question_names_its_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(f'{{"prompt": "a", "answer": "b"}}\n{line}\n')
    with pytest.raises(DataError, match=message):
        read_questions(path)


def test_empty_or_missing_question_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n\n")
    with pytest.raises(DataError, match="there is no question in it"):
        read_questions(tmp_path / "empty")
    with pytest.raises(DataError, match="the questions cannot be read"):
        read_questions(tmp_path / "missing")


def test_impossible_questions_are_refused(
    run: Run, student: Decoder, small: DecoderConfig, tmp_path: Path
) -> None:
    config = EvalConfig(
        tasks=write(tmp_path / "t", [{"prompt": "a", "answer": "b" * 65}]), min_student_accuracy=0.5
    )
    with pytest.raises(DataError, match=r"t:1: .* has 65 tokens, and the context 64"):
        EvalCheck(config).check(run(student))
    with pytest.raises(ConfigError, match="the model is not causal"):
        EvalCheck(config).check(
            run(Decoder(evolve(small, causal=False, architecture=None, sub_norms=False), 256))
        )
    with pytest.raises(DataError, match="it has no tokenizer"):
        EvalCheck(config).check(run(student, data=Nameless()))
    with pytest.raises(
        ValueError, match="'min_student_accuracy' or 'max_accuracy_drop' must be given"
    ):
        EvalConfig()


class Nameless:
    name = "numbers"


def test_byte_tokenizer_reads_questions() -> None:
    assert ByteTokenizer().encode(" to") == [32, 116, 111]
