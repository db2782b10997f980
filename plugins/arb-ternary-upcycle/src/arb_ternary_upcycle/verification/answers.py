"""The check ``eval``: questions that teacher and student answer.

A question with choices is answered by the likeliest continuation of its prompt. An exact question
is answered right if greedy decoding gives its continuation. Both follow from one forward pass over
prompt and continuation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from attrs import frozen
from torch import Tensor

from arb_ternary.errors import ConfigError, DataError
from arb_ternary_text.data.tokenizers import Tokenizer, from_json
from arb_ternary_train.capabilities import attachments
from arb_ternary_train.protocols import CheckResult
from arb_ternary_upcycle.verification.conclusion import conclude
from arb_ternary_upcycle.verification.config import EvalConfig
from arb_ternary_upcycle.verification.pair import Pair, open_pair
from arb_ternary_upcycle.verification.questions import (
    Question,
    built_in_questions,
    read_questions,
)
from arb_ternary_upcycle.verification.reports import judge

if TYPE_CHECKING:
    from arb_ternary_train.context import TrainingContext


class EvalCheck:
    """Has both models answer the same questions."""

    def __init__(self, config: EvalConfig) -> None:
        self.config = config

    def check(self, context: TrainingContext) -> CheckResult:
        """See ``Check``; the report has the choices of both models."""
        config = self.config
        questions = built_in_questions() if config.tasks is None else read_questions(config.tasks)
        pair = open_pair(context, config.teacher)
        if not (pair.teacher.config.causal and pair.student.config.causal):
            raise ConfigError(
                "eval: the model is not causal, so that its logits do not predict the next token"
            )
        teacher, student = answer(
            pair, _tokenizer(context), questions, batch_size=config.batch_size
        )
        teacher_accuracy = _accuracy(questions, teacher)
        student_accuracy = _accuracy(questions, student)
        drop = teacher_accuracy - student_accuracy
        judged = [
            *judge(
                "student accuracy", student_accuracy, config.min_student_accuracy, at_most=False
            ),
            *judge("accuracy drop", drop, config.max_accuracy_drop),
        ]
        metrics = {
            "teacher_accuracy": teacher_accuracy,
            "student_accuracy": student_accuracy,
            "accuracy_drop": drop,
            "questions": float(len(questions)),
        }
        answers = [
            {"where": question.where, "right": question.right, "teacher": its, "student": mine}
            for question, its, mine in zip(questions, teacher, student, strict=True)
        ]
        details: dict[str, Any] = {"teacher": str(pair.teacher.path), "answers": answers}
        return conclude(context, "eval", config, judged, metrics, details)


def _tokenizer(context: TrainingContext) -> Tokenizer:
    data = context.data
    found = attachments(data).get("tokenizer")
    if found is None:
        raise DataError(
            f"data {data.name}: it has no tokenizer to read questions with",
            "Use `data: {name: text, ...}`.",
        )
    return from_json(found)


def _accuracy(questions: Sequence[Question], chosen: Sequence[int]) -> float:
    right = [question.right == index for question, index in zip(questions, chosen, strict=True)]
    return sum(right) / len(right)


@frozen
class _Text:
    """Token ids of a prompt and one continuation, which begins at ``start``."""

    ids: tuple[int, ...]
    start: int


@frozen
class _Score:
    """Log probability of a continuation, and whether greedy decoding gives it."""

    log_probability: float
    greedy: bool


def answer(
    pair: Pair, tokenizer: Tokenizer, questions: Sequence[Question], *, batch_size: int
) -> tuple[list[int], list[int]]:
    """Answer questions, with the teacher and with the student.

    Args:
        pair: the models.
        tokenizer: of both.
        questions: at least one. Prompts that do not fit the context lose their beginnings.
        batch_size: texts per forward pass.

    Returns:
        for each model the index of each question's choice, the first of equally likely ones; -1
        for a wrong answer to an exact question.

    Raises:
        DataError: a continuation adds no token, or does not fit the context.
    """
    longest = min(pair.teacher.config.max_length, pair.student.config.max_length)
    texts = [
        _text(tokenizer, question, choice, longest)
        for question in questions
        for choice in question.choices
    ]
    teacher, student = _scores(pair, texts, batch_size)
    return _chosen(questions, teacher), _chosen(questions, student)


def _text(tokenizer: Tokenizer, question: Question, choice: str, longest: int) -> _Text:
    # Prompt and continuation are encoded together: a token may span both.
    whole = tokenizer.encode(question.prompt + choice)
    start = min(len(tokenizer.encode(question.prompt)), len(whole))
    count = len(whole) - start
    if count == 0 or start == 0:
        raise DataError(
            f"{question.where}: {choice!r} adds no token to the prompt",
            "Begin it with the space before its word.",
        )
    if count > longest:
        raise DataError(
            f"{question.where}: {choice!r} has {count} tokens, and the context {longest}",
            "Shorten it, or choose a model with a larger max_length.",
        )
    # The last id is predicted but not read.
    dropped = max(0, len(whole) - 1 - longest)
    return _Text(tuple(whole[dropped:]), start - dropped)


def _scores(
    pair: Pair, texts: Sequence[_Text], batch_size: int
) -> tuple[list[_Score], list[_Score]]:
    """Score each text with both models. Texts of similar length go together: less is padded."""
    order = sorted(range(len(texts)), key=lambda index: len(texts[index].ids))
    groups = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    inputs = [_padded([texts[index].ids[:-1] for index in group]) for group in groups]
    scores: tuple[dict[int, _Score], dict[int, _Score]] = ({}, {})
    for number, *streams in pair.streams(inputs):
        group = groups[number]
        rows, places, wanted = _predictions([texts[index] for index in group])
        # No logits are needed but those of the continuations.
        needed = [
            stream[rows.to(stream.device), places.to(stream.device)][None] for stream in streams
        ]
        pieces: tuple[list[Tensor], list[Tensor]] = ([], [])
        for place, *logits in pair.logits(*needed):
            for found, logits_MV in zip(pieces, logits, strict=True):
                found.append(_judge_tokens(logits_MV, wanted[place]))
        for scored, found in zip(scores, pieces, strict=True):
            logs_M, greedy_M = torch.cat(found, dim=1)
            for row, index in enumerate(group):
                mine = rows == row
                scored[index] = _Score(float(logs_M[mine].sum()), bool(greedy_M[mine].all()))
    teacher, student = ([each[index] for index in range(len(texts))] for each in scores)
    return teacher, student


def _padded(rows: Sequence[Sequence[int]]) -> Tensor:
    """Return ids ``[B, S]``; padding is at the end, where causal models do not see it."""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], dtype=torch.int64)


def _predictions(texts: Sequence[_Text]) -> tuple[Tensor, Tensor, Tensor]:
    """Return row and position that predict each token of the continuations, and the token."""
    entries = []
    for row, text in enumerate(texts):
        continuation = range(text.start, len(text.ids))
        entries += [(row, place - 1, text.ids[place]) for place in continuation]
    rows, places, wanted = torch.tensor(entries, dtype=torch.int64).unbind(dim=1)
    return rows, places, wanted


def _judge_tokens(logits_MV: Tensor, wanted_M: Tensor) -> Tensor:
    """Return each token's log probability, and 1 if it is the likeliest: float64 ``[2, M]``."""
    logs_MV = torch.log_softmax(logits_MV.double(), dim=-1).cpu()
    logs_M = logs_MV.gather(1, wanted_M[:, None])[:, 0]
    greedy_M = (logs_MV.argmax(dim=1) == wanted_M).double()
    return torch.stack([logs_M, greedy_M])


def _chosen(questions: Sequence[Question], scores: Sequence[_Score]) -> list[int]:
    chosen = []
    taken = 0
    for question in questions:
        mine = scores[taken : taken + len(question.choices)]
        taken += len(mine)
        if question.by_choice:
            # max() takes the first of equally likely choices.
            chosen.append(max(range(len(mine)), key=lambda index: mine[index].log_probability))
        else:
            chosen.append(0 if mine[0].greedy else -1)
    return chosen


def build(config: EvalConfig) -> EvalCheck:
    """Build the check ``eval``."""
    return EvalCheck(config)
