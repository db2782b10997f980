"""A file of questions as tasks of lm-evaluation-harness."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from arb_ternary.errors import DataError

#: How the harness asks a question: the most likely choice counts, or a text that greedy decoding
#: must give.
_CHOICE: Final = "output_type: multiple_choice\ndoc_to_choice: choices"
_EXACT: Final = "output_type: loglikelihood"
_TASK: Final = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
{form}
doc_to_text: prompt
doc_to_target: answer
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""


def write_tasks(questions: Path, folder: Path) -> list[str]:
    """Write task files with the questions of a file to ``folder``, and return the tasks' names.

    A line is ``{"prompt": ..., "choices": [...], "answer": 0}`` or ``{"prompt": ..., "answer":
    "text"}``; empty lines are skipped.

    Raises:
        DataError: the file cannot be read, a line is no question, or there is none; the line is
            named.
    """
    try:
        lines = questions.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise DataError(f"{questions}: the questions cannot be read: {error}") from error
    forms: dict[str, list[str]] = {_CHOICE: [], _EXACT: []}
    for number, line in enumerate(lines, start=1):
        if line.strip():
            forms[_form(line, f"{questions}:{number}")].append(f"{line}\n")

    names = []
    for name, (form, found) in zip(("choice", "exact"), forms.items(), strict=True):
        if found:
            file = folder / f"{name}.jsonl"
            file.write_text("".join(found), encoding="utf-8")
            task = _TASK.format(name=name, file=json.dumps(str(file)), form=form)
            (folder / f"{name}.yaml").write_text(task, encoding="utf-8")
            names.append(name)
    if not names:
        raise DataError(
            f"{questions}: there is no question in it",
            'A line is {"prompt": "1 + 1 =", "answer": " 2"}.',
        )
    return names


def _form(line: str, where: str) -> str:
    """Return the form of the question in a line."""
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where}: not JSON: {error}") from error
    match entry:
        case {"prompt": str(prompt), "answer": str(answer), **rest} if prompt and answer:
            if not rest:
                return _EXACT
        case {"prompt": str(prompt), "choices": [_, _, *_] as choices, "answer": number, **rest}:
            is_number = type(number) is int and 0 <= number < len(choices)
            if prompt and is_number and _are_different_texts(choices) and not rest:
                return _CHOICE
    raise DataError(
        f"{where}: this is no question",
        'Write {"prompt": "...", "choices": ["...", "..."], "answer": 0}, where the choices differ '
        'and the answer is the number of one, or {"prompt": "...", "answer": "..."}. No text is '
        "empty.",
    )


def _are_different_texts(choices: list[Any]) -> bool:
    are_texts = all(isinstance(choice, str) and choice for choice in choices)
    return are_texts and len(set(choices)) == len(choices)
