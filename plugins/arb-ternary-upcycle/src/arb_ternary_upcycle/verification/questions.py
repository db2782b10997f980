"""Questions of a known answer, from a file or made from the built-in text, and what a model says to
them.

A question is answered by choice, the likeliest of several continuations of its prompt, or exactly:
the continuation has to be the one that greedy decoding gives. Both follow from one pass over prompt
and continuation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import torch
from attrs import frozen
from torch import Tensor

from arb_ternary.errors import DataError
from arb_ternary_text.data.shakespeare import load_text
from arb_ternary_text.data.tokenizers import Tokenizer
from arb_ternary_upcycle.verification.pair import Pair, logit_pieces

# : Questions of the two kinds that are made from the built-in text, and the lengths of their parts
# in characters.
_BY_CHOICE: Final = 32
_EXACT: Final = 16
_PROMPT: Final = 160
_CONTINUATION: Final = 40


@frozen
class Question:
    """A prompt, and either ``choices`` with the index of the right one, or the only right
    ``text``.
    """

    prompt: str
    choices: tuple[str, ...]
    right: int
    where: str

    @property
    def by_choice(self) -> bool:
        """Whether there are several continuations to choose among."""
        return len(self.choices) > 1


@frozen
class Answers:
    """Which questions a model answered rightly, and its choices: an index, or for an exact one 0
    (right) or -1.
    """

    chosen: tuple[int, ...]
    right: tuple[bool, ...]

    @property
    def accuracy(self) -> float:
        """Share of right answers."""
        return sum(self.right) / len(self.right)


def built_in_questions() -> list[Question]:
    """32 by choice: which of four passages goes on; 16 exact: the end of a line that was there
    twice before.
    """
    text = load_text("validation")
    places = [
        text.index(" ", len(text) * number // (_BY_CHOICE + 1))
        for number in range(1, _BY_CHOICE + 1)
    ]
    passages = [text[place : text.index(" ", place + _CONTINUATION)] for place in places]
    questions = []
    for number, place in enumerate(places):
        others = [passages[(number + step) % _BY_CHOICE] for step in (8, 16, 24)]
        right = number % (len(others) + 1)
        choices = (*others[:right], passages[number], *others[right:])
        questions.append(
            Question(
                text[place - _PROMPT : place], choices, right, f"built-in question {number + 1}"
            )
        )
    lines = [
        line for line in text.splitlines() if len(line) == _CONTINUATION and line[-2].isalpha()
    ]
    for number in range(_EXACT):
        line = lines[len(lines) * number // _EXACT]
        cut = line.rindex(" ")
        where = f"built-in question {_BY_CHOICE + number + 1}"
        questions.append(Question(f"{line}\n{line}\n{line[:cut]}", (line[cut:],), 0, where))
    return questions


def read_questions(path: Path) -> list[Question]:
    """The questions in a file of one JSON object a line.

    ``{"prompt": ..., "choices": [...], "answer": 0}`` or ``{"prompt": ..., "answer": "text"}``;
    empty lines do not count.

    Raises:
        DataError: the file cannot be read, a line is no question, or there is none; the line is
            named.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: the questions cannot be read: {error}") from error
    found = [
        _question(line, f"{path}:{number}")
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not found:
        raise DataError(
            f"{path}: there is no question in it",
            'A line is {"prompt": "1 + 1 =", "answer": " 2"}.',
        )
    return found


def _question(line: str, where: str) -> Question:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where}: not JSON: {error}") from error
    hint = (
        'Write {"prompt": "...", "choices": ["...", "..."], "answer": 0} or {"prompt": "...", '
        '"answer": "..."}.'
    )
    if not isinstance(entry, Mapping) or entry.keys() not in (
        {"prompt", "answer"},
        {"prompt", "choices", "answer"},
    ):
        raise DataError(
            f"{where}: a question has prompt and answer, and may have choices, and nothing else",
            hint,
        )
    prompt = entry["prompt"]
    choices = entry.get("choices")
    right = entry["answer"]
    if not isinstance(prompt, str) or not prompt:
        raise DataError(f"{where}: prompt must be a text that is not empty", hint)
    if choices is None:
        choices = [right]
        right = 0
    elif (
        not isinstance(choices, list)
        or len(choices) < 2
        or len(set(map(str, choices))) < len(choices)
    ):
        raise DataError(f"{where}: choices must be two or more different texts", hint)
    if not all(isinstance(choice, str) and choice for choice in choices):
        raise DataError(
            f"{where}: {'choices' if len(choices) > 1 else 'answer'} must be texts, none of them "
            f"empty",
            hint,
        )
    if type(right) is not int or not 0 <= right < len(choices):
        raise DataError(
            f"{where}: answer must be the number of a choice, from 0 to {len(choices) - 1}", hint
        )
    return Question(prompt, tuple(choices), right, where)


@frozen
class _Text:
    """Token ids of a prompt and one continuation, which begins at ``start``."""

    ids: tuple[int, ...]
    start: int


def answer(
    pair: Pair,
    tokenizer: Tokenizer,
    questions: Sequence[Question],
    *,
    batch_size: int,
    longest: int,
) -> tuple[Answers, Answers]:
    """What teacher and student say to ``questions``.

    Of equally likely choices the first counts. Prompts that do not fit the context lose their
    beginnings.

    Args:
        pair: the models.
        tokenizer: of both.
        questions: at least one.
        batch_size: texts in a pass.
        longest: most ids of a pass.

    Raises:
        DataError: a continuation is no token of its own, or does not fit the context.
    """
    texts = [_text(tokenizer, q, choice, longest) for q in questions for choice in q.choices]
    scores = _scores(pair, texts, batch_size)
    return _answers(questions, scores[0]), _answers(questions, scores[1])


def _text(tokenizer: Tokenizer, question: Question, choice: str, longest: int) -> _Text:
    # The seam belongs to both: tokenizers look across it.
    whole = tokenizer.encode(question.prompt + choice)
    start = min(len(tokenizer.encode(question.prompt)), len(whole))
    if start == len(whole) or start == 0:
        raise DataError(
            f"{question.where}: {choice!r} adds no token to the prompt",
            "Begin it with the space before its word.",
        )
    if len(whole) - start > longest:
        raise DataError(
            f"{question.where}: {choice!r} has {len(whole) - start} tokens, and the context "
            f"{longest}",
            "Shorten it, or choose a model with a larger max_length.",
        )
    # The last id is predicted and not read.
    dropped = max(0, len(whole) - 1 - longest)
    return _Text(tuple(whole[dropped:]), start - dropped)


def _scores(
    pair: Pair, texts: Sequence[_Text], batch_size: int
) -> tuple[list[_Score], list[_Score]]:
    """Of each text, by teacher and student. Short texts go together, so that little is padded."""
    order = sorted(range(len(texts)), key=lambda index: (len(texts[index].ids), index))
    groups = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    inputs = [_padded([texts[index].ids[:-1] for index in group]) for group in groups]
    found: tuple[dict[int, _Score], dict[int, _Score]] = ({}, {})
    for number, *streams in pair.streams(inputs):
        rows, places, wanted = _asked([texts[index] for index in groups[number]])
        # Only the positions before a continuation's tokens: of the others no logit is made.
        asked = [
            stream[rows.to(stream.device), places.to(stream.device)][None] for stream in streams
        ]
        said: tuple[list[Tensor], list[Tensor]] = ([], [])
        for place, *logits in logit_pieces(pair, *asked):
            for side in (0, 1):
                said[side].append(_said(logits[side], wanted[place]))
        for side in (0, 1):
            chance_M, greedy_M = torch.cat(said[side], dim=1)
            for row, index in enumerate(groups[number]):
                mine = rows == row
                found[side][index] = _Score(float(chance_M[mine].sum()), bool(greedy_M[mine].all()))
    return [found[0][index] for index in range(len(texts))], [
        found[1][index] for index in range(len(texts))
    ]


@frozen
class _Score:
    """Log probability of a continuation, and whether greedy decoding gives it."""

    log_probability: float
    greedy: bool


def _padded(rows: Sequence[Sequence[int]]) -> Tensor:
    """Ids ``[B, S]``; what follows a row's end is hidden from it, for the models are causal."""
    longest = max(len(row) for row in rows)
    return torch.tensor([[*row, *([0] * (longest - len(row)))] for row in rows], dtype=torch.int64)


def _asked(texts: Sequence[_Text]) -> tuple[Tensor, Tensor, Tensor]:
    """Row and position before each token of the continuations, and that token; int64 ``[M]``
    each.
    """
    entries = [
        (row, place - 1, text.ids[place])
        for row, text in enumerate(texts)
        for place in range(text.start, len(text.ids))
    ]
    rows, places, wanted = torch.tensor(entries, dtype=torch.int64).unbind(dim=1)
    return rows, places, wanted


def _said(logits_MV: Tensor, wanted_M: Tensor) -> Tensor:
    """Log probability of each wanted token, and 1 where it is the likeliest: float64 ``[2, M]``."""
    logs_MV = torch.log_softmax(logits_MV.double(), dim=-1).cpu()
    return torch.stack(
        [logs_MV.gather(1, wanted_M[:, None])[:, 0], (logs_MV.argmax(dim=1) == wanted_M).double()]
    )


def _answers(questions: Sequence[Question], scores: Sequence[_Score]) -> Answers:
    chosen = []
    right = []
    taken = 0
    for question in questions:
        mine = scores[taken : taken + len(question.choices)]
        taken += len(mine)
        if question.by_choice:
            best = max(range(len(mine)), key=lambda index: (mine[index].log_probability, -index))
        else:
            best = 0 if mine[0].greedy else -1
        chosen.append(best)
        right.append(best == question.right)
    return Answers(tuple(chosen), tuple(right))
