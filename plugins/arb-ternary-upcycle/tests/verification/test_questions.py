"""Files of questions: what is wrong with a line."""

from __future__ import annotations

from pathlib import Path

import pytest

from arb_ternary.errors import DataError
from arb_ternary_upcycle.verification.questions import write_tasks


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '{"prompt": "a", "answer": "b", "anwser": 1}',
        '{"prompt": "", "answer": "b"}',
        '{"prompt": "a", "answer": ""}',
        '{"prompt": "a", "answer": 3}',
        '{"prompt": "a", "choices": ["b"], "answer": 0}',
        '{"prompt": "a", "choices": ["b", "b"], "answer": 0}',
        '{"prompt": "a", "choices": ["b", 1], "answer": 0}',
        '{"prompt": "a", "choices": ["b", "c"], "answer": 2}',
        '{"prompt": "a", "choices": ["b", "c"], "answer": true}',
        '{"prompt": "a", "choices": "bc", "answer": 0}',
        '{"prompt": "a", "choices": ["b", "c"], "answer": 0, "more": 1}',
    ],
)
def test_invalid_question_names_its_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(f'{{"prompt": "a", "answer": "b"}}\n{line}\n')
    with pytest.raises(DataError, match=r"tasks\.jsonl:2: (not JSON|this is no question)"):
        write_tasks(path, tmp_path)


def test_empty_or_missing_question_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n\n")
    with pytest.raises(DataError, match="there is no question in it"):
        write_tasks(tmp_path / "empty", tmp_path)
    with pytest.raises(DataError, match="the questions cannot be read"):
        write_tasks(tmp_path / "missing", tmp_path)
