"""Questions with a known answer, from a file or made from the built-in text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from attrs import frozen

from arb_ternary.errors import DataError
from arb_ternary_text.data.shakespeare import load_text

#: Questions of the two kinds that are made from the built-in text.
_BY_CHOICE: Final = 32
_EXACT: Final = 16
#: Lengths of their parts in characters.
_PROMPT: Final = 160
_CONTINUATION: Final = 40

_FORMS: Final = (
    'Write {"prompt": "...", "choices": ["...", "..."], "answer": 0} or {"prompt": "...", '
    '"answer": "..."}.'
)


@frozen
class Question:
    """A prompt and its possible continuations.

    Attributes:
        prompt: the text before.
        choices: several, and the likeliest one counts; or a single one, which greedy decoding has
            to give.
        right: index of the right one.
        where: names the question in messages.
    """

    prompt: str
    choices: tuple[str, ...]
    right: int
    where: str

    @property
    def by_choice(self) -> bool:
        """Whether there are several continuations to choose among."""
        return len(self.choices) > 1


def built_in_questions() -> list[Question]:
    """Make questions from the validation text.

    32 are by choice: which of four passages goes on. 16 are exact: the end of a line that has
    occurred twice before.
    """
    text = load_text("validation")
    starts = [len(text) * number // (_BY_CHOICE + 1) for number in range(1, _BY_CHOICE + 1)]
    places = [text.index(" ", start) for start in starts]
    passages = [text[place : text.index(" ", place + _CONTINUATION)] for place in places]
    questions = []
    for number, place in enumerate(places):
        choices = [passages[(number + step) % _BY_CHOICE] for step in (8, 16, 24)]
        right = number % (len(choices) + 1)
        choices.insert(right, passages[number])
        prompt = text[place - _PROMPT : place]
        where = f"built-in question {number + 1}"
        questions.append(Question(prompt, tuple(choices), right, where))

    lines = [line for line in text.splitlines() if len(line) == _CONTINUATION]
    lines = [line for line in lines if line[-2].isalpha()]
    for number in range(_EXACT):
        line = lines[len(lines) * number // _EXACT]
        cut = line.rindex(" ")
        where = f"built-in question {_BY_CHOICE + number + 1}"
        questions.append(Question(f"{line}\n{line}\n{line[:cut]}", (line[cut:],), 0, where))
    return questions


def read_questions(path: Path) -> list[Question]:
    """Read a file with one JSON object per line.

    A line is ``{"prompt": ..., "choices": [...], "answer": 0}`` or ``{"prompt": ..., "answer":
    "text"}``; empty lines are skipped.

    Raises:
        DataError: the file cannot be read, a line is no question, or there is none; the line is
            named.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: the questions cannot be read: {error}") from error
    found = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            found.append(_question(line, f"{path}:{number}"))
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
    keys = set(entry) if isinstance(entry, Mapping) else set()
    if keys - {"choices"} != {"prompt", "answer"}:
        raise DataError(
            f"{where}: a question has prompt and answer, and may have choices, and nothing else",
            _FORMS,
        )
    prompt = entry["prompt"]
    if not _is_text(prompt):
        raise DataError(f"{where}: prompt must be a text that is not empty", _FORMS)
    answer = entry["answer"]
    if "choices" not in entry:
        if not _is_text(answer):
            raise DataError(f"{where}: answer must be a text that is not empty", _FORMS)
        return Question(prompt, (answer,), 0, where)
    choices = entry["choices"]
    if not isinstance(choices, list) or len(choices) < 2:
        raise DataError(f"{where}: choices must be two or more different texts", _FORMS)
    if not all(map(_is_text, choices)):
        raise DataError(f"{where}: choices must be texts, none of them empty", _FORMS)
    if len(set(choices)) < len(choices):
        raise DataError(f"{where}: choices must be two or more different texts", _FORMS)
    if type(answer) is not int or not 0 <= answer < len(choices):
        raise DataError(
            f"{where}: answer must be the number of a choice, from 0 to {len(choices) - 1}", _FORMS
        )
    return Question(prompt, tuple(choices), answer, where)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""
