"""Conversations in files: JSON lines, JSON, CSV and Parquet.

What a record is, is told by its keys: ``messages``, or ``conversations`` as ShareGPT has them;
``prompt`` and ``completion``, texts or lists of messages; ``instruction``, ``input`` and ``output``
as Alpaca has them; or ``text``, which is not a conversation. ``system`` beside them is a message of
its own. Keys of other names are mapped by ``columns``, and further keys are left alone.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import attrs

from arb_ternary.errors import DataError
from arb_ternary_text.data.files import find_text_files, read_utf8
from arb_ternary_text.data.parquet_file import open_parquet

OnBadLine = Literal["error", "skip"]

#: Keys that `columns` can map to others.
COLUMNS: Final = (
    *("messages", "role", "content", "prompt", "completion", "text", "system"),
    *("instruction", "input", "output"),
)
#: Roles by the names that files have for them.
_ROLES: Final = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "bot": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
}
#: The roles that may follow each role; None is the beginning.
_FOLLOWING: Final[dict[str | None, tuple[str, ...]]] = {
    None: ("system", "developer", "user"),
    "system": ("user",),
    "developer": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool"),
}
#: Longest field of a CSV file, in characters.
_LONGEST_FIELD: Final = 2**31 - 1


@attrs.frozen
class Conversation:
    """A conversation, or a plain text.

    Attributes:
        messages: each with ``role``, ``content`` and what else the file says; empty for a text.
        origin: file and line, or row.
        given: number of messages at the beginning that are a prompt, which is not learned.
        text: the text, if it is no conversation.
    """

    messages: tuple[Mapping[str, Any], ...]
    origin: str
    given: int = 0
    text: str | None = None


@attrs.frozen
class Conversations:
    """Conversations that were read from files.

    Attributes:
        items: the conversations, in the order of the files.
        skipped: what is wrong with each line that was left out.
    """

    items: tuple[Conversation, ...]
    skipped: tuple[str, ...] = ()


def read_conversations(
    path: str, columns: Mapping[str, str] | None = None, on_bad_line: OnBadLine = "error"
) -> Conversations:
    """Read the conversations of a file, of a folder or of the files that match a pattern.

    Args:
        path: a ``.jsonl``, ``.json``, ``.csv`` or ``.parquet`` file, a folder of them or a glob
            pattern.
        columns: names of the file's keys by the names that are used here (:data:`COLUMNS`).
        on_bad_line: ``error``, or ``skip`` to leave out what is wrong.

    Raises:
        DataError: there is no such file, it has no conversation, or a line is wrong; the message
            has file and line.
        EnvironmentProblem: a Parquet file needs pyarrow, which is not installed.
    """
    names = {name: name for name in COLUMNS} | dict(columns or {})
    items: list[Conversation] = []
    skipped: list[str] = []
    for file in find_conversation_files(path):
        for origin, record in _records(file):
            try:
                if isinstance(record, DataError):
                    raise record
                items.append(_conversation(record, names, origin))
            except DataError as error:
                if on_bad_line == "error":
                    raise
                skipped.append(error.what)
    if not items:
        first = f"; {len(skipped)} lines are wrong, the first: {skipped[0]}" if skipped else ""
        raise DataError(f"{path}: there is no conversation{first}")
    return Conversations(tuple(items), tuple(skipped))


def find_conversation_files(path: str) -> list[Path]:
    """Return the files that ``path`` names, in the order of their names.

    Raises:
        DataError: there is no such file, or it has another suffix than those that are read.
    """
    files = find_text_files(path, tuple(_READERS))
    for file in files:
        if file.suffix.lower() not in _READERS:
            raise DataError(f"{file}: conversations are read from {', '.join(_READERS)} files")
    return files


# --- files


def _records(file: Path) -> Iterator[tuple[str, Any]]:
    """Yield origin and record of each line of a file; a DataError for a line that is wrong."""
    for place, record in _READERS[file.suffix.lower()](file):
        origin = f"{file}:{place}"
        if isinstance(record, ValueError):
            yield origin, DataError(f"{origin}: {record}")
        elif not isinstance(record, dict):
            yield origin, DataError(f"{origin}: not a JSON object but {_kind(record)}")
        else:
            yield origin, record


def _json_lines(file: Path) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(read_utf8(file).split("\n"), start=1):
        if line.strip():
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                record = ValueError(f"not JSON: {error}")
            yield str(number), record


def _json_file(file: Path) -> Iterator[tuple[str, Any]]:
    """Yield the records of a list; a file that is no list is read as JSON lines."""
    content = read_utf8(file)
    if not content.lstrip().startswith("["):
        yield from _json_lines(file)
        return
    decoder = json.JSONDecoder()
    line = 1
    seen = 0
    place = _after_space(content, content.index("[") + 1)
    while content[place : place + 1] != "]":
        line += content.count("\n", seen, place)
        seen = place
        try:
            record, place = decoder.raw_decode(content, place)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{file}:{line}: not JSON: {error}") from error
        yield str(line), record
        place = _after_space(content, place)
        if content[place : place + 1] == ",":
            place = _after_space(content, place + 1)
        elif content[place : place + 1] != "]":
            raise DataError(f"{file}:{line}: not JSON: a list has no end after this record")


def _after_space(content: str, place: int) -> int:
    while content[place : place + 1].isspace():
        place += 1
    return place


def _csv_file(file: Path) -> Iterator[tuple[str, Any]]:
    reader = csv.DictReader(io.StringIO(read_utf8(file), newline=""), strict=True)
    limit = csv.field_size_limit(_LONGEST_FIELD)
    try:
        while True:
            number = reader.line_num + 1 if reader.fieldnames else 1
            try:
                record: dict[Any, Any] | ValueError = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                raise DataError(f"{file}:{number}: not CSV: {error}") from error
            if isinstance(record, dict) and None in record:
                record = ValueError(
                    f"more than the {len(reader.fieldnames or ())} fields of line 1"
                )
            elif isinstance(record, dict) and None in record.values():
                record = ValueError(
                    f"fewer than the {len(reader.fieldnames or ())} fields of line 1"
                )
            yield str(number), record
    finally:
        csv.field_size_limit(limit)


def _parquet_file(file: Path) -> Iterator[tuple[str, Any]]:
    number = 0
    try:
        with open_parquet(file) as opened:
            for batch in opened.iter_batches():
                for record in batch.to_pylist():
                    number += 1
                    yield f"row {number}", record
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror or error}") from error


_READERS: Final[dict[str, Callable[[Path], Iterator[tuple[str, Any]]]]] = {
    ".jsonl": _json_lines,
    ".json": _json_file,
    ".csv": _csv_file,
    ".parquet": _parquet_file,
}


# --- records


def _conversation(record: dict[str, Any], names: Mapping[str, str], origin: str) -> Conversation:
    """Return the conversation of a record.

    Raises:
        DataError: the record has none, or it is wrong.
    """
    values = {name: record.get(key) for name, key in names.items()}
    # None and, in tables, empty fields stand for what a record does not have.
    has = {name for name, value in values.items() if value not in (None, "")}
    if "messages" in has:
        messages = _messages(values["messages"], names, origin)
        return _checked(values, messages, 0, origin)
    if record.get("conversations") is not None:
        shared = {**names, "role": "from", "content": "value"}
        turns = record["conversations"]
        # Some files have ShareGPT's key and the usual names inside.
        if isinstance(turns, list) and all(isinstance(t, dict) and "role" in t for t in turns):
            shared = dict(names)
        return _checked(values, _messages(turns, shared, origin), 0, origin)
    if {"prompt", "completion"} <= has:
        prompt = _side(values["prompt"], "user", names, origin)
        completion = _side(values["completion"], "assistant", names, origin)
        return _checked(values, [*prompt, *completion], len(prompt), origin)
    if {"instruction", "output"} <= has:
        question = _text(values["instruction"], "instruction", origin)
        if "input" in has:
            question = f"{question}\n\n{_text(values['input'], 'input', origin)}"
        answer = _text(values["output"], "output", origin)
        pair = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return _checked(values, pair, 0, origin)
    if "text" in has:
        return Conversation((), origin, text=_text(values["text"], "text", origin))
    given = ", ".join(sorted(map(str, record))) or "none"
    raise DataError(
        f"{origin}: no conversation: a record has messages, prompt and completion, text, "
        f"conversations, or instruction and output; the keys are {given}",
        "Map other keys, such as columns: {prompt: question, completion: answer}.",
    )


def _side(value: Any, role: str, names: Mapping[str, str], origin: str) -> list[dict[str, Any]]:
    """Return the messages of a prompt or of a completion."""
    if isinstance(value, str):
        return [{"role": role, "content": _text(value, role, origin)}]
    return _messages(value, names, origin)


def _messages(value: Any, names: Mapping[str, str], origin: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise DataError(f"{origin}: messages must be a list of at least one, not {_kind(value)}")
    return [_message(each, names, f"{origin}: message {n}") for n, each in enumerate(value, 1)]


def _message(value: Any, names: Mapping[str, str], origin: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f"{origin}: not an object but {_kind(value)}")
    said = value.get(names["role"])
    role = _ROLES.get(said.lower()) if isinstance(said, str) else None
    if role is None:
        rule = f"{names['role']} must be one of {', '.join(_ROLES)}, not {said!r}"
        raise DataError(f"{origin}: {rule}")
    content = value.get(names["content"])
    if isinstance(content, list):
        content = "".join(_part(part, origin) for part in content)
    others = {
        key: each
        for key, each in value.items()
        if key not in (names["role"], names["content"]) and each is not None
    }
    if others.get("tool_calls"):
        raise DataError(f"{origin}: calls of tools (tool_calls) cannot be learned")
    return {"role": role, "content": _text(content, names["content"], origin), **others}


def _part(part: Any, origin: str) -> str:
    """Return the text of a part of a message."""
    if isinstance(part, dict) and part.get("type", "text") == "text":
        return _text(part.get("text"), "text", origin)
    kind = part.get("type") if isinstance(part, dict) else _kind(part)
    raise DataError(f"{origin}: a part of the content is {kind!r}, and only text can be learned")


def _text(value: Any, name: str, origin: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{origin}: {name} must be text, not {_kind(value)}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"{origin}: {name} has half of a surrogate pair (U+{ord(value[error.start]):04X}) at "
            f"character {error.start}, which is no text"
        ) from error
    return value


def _checked(
    values: Mapping[str, Any], messages: Sequence[dict[str, Any]], given: int, origin: str
) -> Conversation:
    """Return a conversation whose roles are in order, with the record's system message."""
    if values["system"] not in (None, ""):
        system = {"role": "system", "content": _text(values["system"], "system", origin)}
        messages = [system, *messages]
        given += 1 if given else 0
    before: str | None = None
    for number, message in enumerate(messages, start=1):
        allowed = _FOLLOWING[before]
        if message["role"] not in allowed:
            place = "the first message" if before is None else f"a message of {before}"
            rule = "is" if before is None else "is followed by one of"
            raise DataError(
                f"{origin}: message {number}: roles are in an odd order: {place} {rule} "
                f"{' or '.join(allowed)}, not {message['role']}"
            )
        before = message["role"]
    if not any(message["role"] == "assistant" for message in messages[given:]):
        raise DataError(f"{origin}: the conversation has no answer of the assistant")
    return Conversation(tuple(messages), origin, given)


def _kind(value: Any) -> str:
    """Return what a value is called in JSON."""
    kinds = {dict: "an object", list: "a list", str: "text", bool: "true or false"}
    if value is None:
        return "nothing"
    return kinds.get(type(value), "a number")
