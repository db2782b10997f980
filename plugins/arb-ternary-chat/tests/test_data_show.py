"""``arb data show``: what a model reads and learns of conversations."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from arb_ternary.cli.main import main


@pytest.fixture
def file(tmp_path: Path) -> Path:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    more = [*messages, {"role": "user", "content": "x" * 30}, messages[1]]
    records = [{"messages": each} for each in (messages, messages, more)]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_learned_text_and_statistics_are_shown(
    run: Path, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["data", "show", str(file), "--model", str(run), "--first", "1"]
    assert main([*command, "--block-size", "40", "--too-long", "cut"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{file}:1: ")
    expected = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n«yes»«<|im_end|>»\n"
    assert expected in out
    assert out.count("hi") == 1
    short = len(b"user\nhi\nassistant\nyes\n") + 4
    long = 2 * short - 2 + 30
    table = dict(re.split(r"\s{2,}", line) for line in out.splitlines()[-7:])
    assert table == {
        "conversations": "3",
        "duplicates": "1",
        "tokens": str(2 * short + long),
        "learned tokens": f"16 ({16 / (2 * short + long):.1%})",
        "longest conversation": f"{long} tokens",
        "rows of 41 tokens": "3",
        "tokens cut off": f"{long - 41} ({(long - 41) / (2 * short + long):.1%})",
    }


def test_a_bad_line_and_a_missing_template_are_named(
    run: Path, base_run: Path, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "show", str(file), "--model", str(base_run)]) == 1
    assert "has no chat_template" in capsys.readouterr().err
    with file.open("a") as opened:
        opened.write('{"messages": [}\n')
    assert main(["data", "show", str(file), "--model", str(run)]) == 1
    assert f"{file}:4: not JSON" in capsys.readouterr().err
