"""Conversations in files of every kind, and what is wrong with a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from arb_ternary.errors import DataError
from arb_ternary_text.chat.conversations import read_conversations

PAIR = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


def lines(path: Path, *records: Any) -> str:
    path.write_text("\n".join(json.dumps(record) for record in records) + "\n")
    return str(path)


@pytest.mark.parametrize(
    ("record", "given"),
    [
        ({"messages": PAIR, "id": 3}, 0),
        ({"prompt": "Hi", "completion": "Hello"}, 1),
        ({"prompt": PAIR[:1], "completion": PAIR[1:]}, 1),
        (
            {
                "conversations": [
                    {"from": "human", "value": "Hi"},
                    {"from": "gpt", "value": "Hello"},
                ]
            },
            0,
        ),
        ({"conversations": PAIR}, 0),
        ({"instruction": "Hi", "input": "", "output": "Hello"}, 0),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": t} for t in "Hi"]},
                    PAIR[1],
                ]
            },
            0,
        ),
    ],
)
def test_kinds_of_records_give_the_same_conversation(
    record: dict[str, Any], given: int, tmp_path: Path
) -> None:
    (found,) = read_conversations(lines(tmp_path / "a.jsonl", record)).items
    assert list(found.messages) == PAIR
    assert found.given == given
    assert found.origin == f"{tmp_path / 'a.jsonl'}:1"


def test_further_keys_of_records(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "a.jsonl",
        {"system": "Be brief.", "prompt": "Hi", "completion": "Hello"},
        {"instruction": "Add", "input": "1 2", "output": "3"},
        {"text": "plain"},
        {"messages": [PAIR[0], {**PAIR[1], "reasoning_content": "hm", "name": None}]},
    )
    first, second, third, fourth = read_conversations(path).items
    assert first.messages[0] == {"role": "system", "content": "Be brief."}
    assert first.given == 2
    assert second.messages[0]["content"] == "Add\n\n1 2"
    assert (third.messages, third.text) == ((), "plain")
    assert fourth.messages[1] == {**PAIR[1], "reasoning_content": "hm"}


def test_columns_name_other_keys(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", {"q": "Hi", "a": "Hello"})
    columns = {"prompt": "q", "completion": "a"}
    assert list(read_conversations(path, columns).items[0].messages) == PAIR
    inner = [{"who": "user", "said": "Hi"}, {"who": "bot", "said": "Hello"}]
    path = lines(tmp_path / "b.jsonl", {"turns": inner})
    columns = {"messages": "turns", "role": "who", "content": "said"}
    assert list(read_conversations(path, columns).items[0].messages) == PAIR


def test_files_of_every_kind(tmp_path: Path) -> None:
    records = [{"prompt": 'a,\n"b"', "completion": "c"}, {"prompt": "d", "completion": "é"}]
    lines(tmp_path / "a.jsonl", *records)
    (tmp_path / "b.json").write_text(json.dumps(records, indent=2))
    lines(tmp_path / "c.json", *records)
    (tmp_path / "d.csv").write_text('prompt,completion\n"a,\n""b""",c\nd,é\n', encoding="utf-8")
    (tmp_path / ".hidden.jsonl").write_text("no JSON")
    found = read_conversations(str(tmp_path)).items
    said = [[message["content"] for message in each.messages] for each in found]
    assert said == [['a,\n"b"', "c"], ["d", "é"]] * 4
    places = [each.origin.removeprefix(f"{tmp_path}/") for each in found]
    assert places[:4] == ["a.jsonl:1", "a.jsonl:2", "b.json:2", "b.json:6"]
    assert places[6:] == ["d.csv:2", "d.csv:4"]
    assert len(read_conversations(f"{tmp_path}/*.json").items) == 4


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.Table.from_pylist([{"messages": PAIR}, {"messages": PAIR[:1]}])
    parquet.write_table(table, tmp_path / "a.parquet")
    path = str(tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a.parquet:row 2: the conversation has no answer"):
        read_conversations(path)
    found = read_conversations(path, on_bad_line="skip")
    assert [list(each.messages) for each in found.items] == [PAIR]
    assert len(found.skipped) == 1
    (tmp_path / "a.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(DataError, match=r"a.parquet: not a readable Parquet file"):
        read_conversations(path)


def talk(*roles: str) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": "x"} for role in roles]}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (talk("user", "user", "assistant"), "message 2: roles are in an odd order: a message of"),
        (talk("assistant"), "message 1: roles are in an odd order: the first message is"),
        (talk("user", "system", "assistant"), "message 2: roles are in an odd order"),
        (talk("system", "user"), "the conversation has no answer of the assistant"),
        ({"messages": []}, "messages must be a list of at least one"),
        ({"messages": "Hi"}, "messages must be a list of at least one, not text"),
        (talk("judge"), "message 1: role must be one of system, .*, not 'judge'"),
        ({"messages": [{"role": "user"}]}, "message 1: content must be text, not nothing"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "message 1: a part of the content is 'image', and only text",
        ),
        (
            {"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]},
            r"calls of tools \(tool_calls\) cannot be learned",
        ),
        ({"text": "\ud800"}, r"text has half of a surrogate pair \(U\+D800\) at character 0"),
        ({"question": "a"}, "no conversation: a record has .*; the keys are question"),
        ([1], "not a JSON object but a list"),
    ],
)
def test_wrong_record_is_named_by_file_and_line(record: Any, message: str, tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", {"messages": PAIR}, record)
    with pytest.raises(DataError, match=f"^{path}:2: .*{message}"):
        read_conversations(path)
    found = read_conversations(path, on_bad_line="skip")
    assert len(found.items) == 1
    (skipped,) = found.skipped
    assert skipped.startswith(f"{path}:2: ")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"text": "a"}\n{"text": \n', r"a.jsonl:2: not JSON: Expecting value"),
        ("a.json", '[{"text": "a"},\n {"text"}]', r"a.json:2: not JSON: "),
        ("a.json", '[{"text": "a"}', r"a.json:1: not JSON: a list has no end after this record"),
        ("a.csv", "text,b\nx,y\nz\n", r"a.csv:3: fewer than the 2 fields of line 1"),
        ("a.csv", "text\nx,y\n", r"a.csv:2: more than the 1 fields of line 1"),
        ("a.jsonl", "", r"a.jsonl: there is no conversation"),
        ("a.json", "[]", r"a.json: there is no conversation"),
        ("a.csv", "text\n", r"a.csv: there is no conversation"),
        ("a.txt", "text\n", r"a.txt: conversations are read from .jsonl, .json, .csv, .parquet"),
    ],
)
def test_damaged_files_are_errors(name: str, content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        read_conversations(str(tmp_path / name))


def test_nothing_to_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"the folder has no .jsonl, .json, .csv, .parquet file"):
        read_conversations(str(tmp_path))
    with pytest.raises(DataError, match="no such file or folder"):
        read_conversations(str(tmp_path / "none.jsonl"))
    path = lines(tmp_path / "a.jsonl", {"a": 1})
    with pytest.raises(DataError, match=r"there is no conversation; 1 lines are wrong, the first"):
        read_conversations(path, on_bad_line="skip")
