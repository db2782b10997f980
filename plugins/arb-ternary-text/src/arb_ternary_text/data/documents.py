"""Documents in files, one after another, each with the place behind it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import attrs

from arb_ternary.errors import DataError, EnvironmentProblem
from arb_ternary_text.data.parquet_file import open_parquet

#: Endings of files with documents.
ENDINGS: Final = (".txt", ".jsonl", ".parquet")
#: Most bytes of one document.
LARGEST_DOCUMENT: Final = 1 << 25
_CHUNK: Final = 1 << 20
#: Rows of a Parquet file that are read at once.
_ROWS: Final = 256


@attrs.frozen
class Place:
    """A place between two documents.

    Attributes:
        file: number of files before it.
        offset: bytes of the file before it; rows of a Parquet file.
        line: lines of the file before it.
    """

    file: int = 0
    offset: int = 0
    line: int = 0


@attrs.frozen
class Document:
    """A document.

    Attributes:
        text: its text.
        origin: file, and line or row.
        end: the place behind it.
    """

    text: str
    origin: str
    end: Place


@attrs.frozen
class Corpus:
    """Documents of several files.

    Attributes:
        files: the files, in order.
        column: key of the text in ``.jsonl`` and ``.parquet`` files.
        separator: text between the documents of a ``.txt`` file; None: a file is one document.
    """

    files: tuple[Path, ...]
    column: str = "text"
    separator: str | None = None

    def documents(self, start: Place) -> Iterator[Document]:
        """Yield the documents behind ``start``. Documents without a character are left out.

        Raises:
            DataError: a file cannot be read or is not what its ending says; file and line come
                first.
            EnvironmentProblem: a Parquet file needs pyarrow, which is not installed.
        """
        readers = {".txt": self._texts, ".jsonl": self._lines, ".parquet": self._rows}
        for number in range(start.file, len(self.files)):
            path = self.files[number]
            place = start if number == start.file else Place(number)
            try:
                yield from readers[path.suffix.lower()](path, place)
            except OSError as error:
                raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error

    def _texts(self, path: Path, place: Place) -> Iterator[Document]:
        separator = None if self.separator is None else self.separator.encode()
        with path.open("rb") as file:
            file.seek(place.offset)
            offset = place.offset
            pending = b""
            at_end = False
            while not at_end:
                chunk = file.read(_CHUNK)
                at_end = not chunk
                pending += chunk
                whole = [] if separator is None else pending.split(separator)
                if not at_end and separator is not None:
                    pending = whole.pop()
                elif at_end:
                    whole = [pending] if separator is None else whole
                    pending = b""
                if len(pending) > LARGEST_DOCUMENT:
                    raise DataError(
                        f"{path}: a document of more than {LARGEST_DOCUMENT >> 20} MiB at byte "
                        f"{offset}",
                        "Say by --separator what stands between documents, such as "
                        "--separator '<|endoftext|>'.",
                    )
                for number, content in enumerate(whole):
                    is_last = at_end and number == len(whole) - 1
                    origin = f"{path}, byte {offset}"
                    offset += len(content) + (0 if is_last or separator is None else len(separator))
                    text = _decoded(content, origin)
                    if text.strip():
                        yield Document(text, origin, Place(place.file, offset))

    def _lines(self, path: Path, place: Place) -> Iterator[Document]:
        with path.open("rb") as file:
            file.seek(place.offset)
            line = place.line
            while content := file.readline(LARGEST_DOCUMENT):
                line += 1
                origin = f"{path}:{line}"
                if len(content) == LARGEST_DOCUMENT:
                    raise DataError(f"{origin}: more than {LARGEST_DOCUMENT >> 20} MiB in a line")
                if not content.strip():
                    continue
                try:
                    record = json.loads(_decoded(content, origin))
                except (ValueError, RecursionError) as error:
                    raise DataError(f"{origin}: not JSON: {error}") from error
                text = record.get(self.column) if isinstance(record, dict) else None
                if not isinstance(text, str):
                    raise DataError(
                        f"{origin}: there is no text under {self.column!r}",
                        f"Say by --column which key has the text{_keys_of(record)}.",
                    )
                if text.strip():
                    yield Document(text, origin, Place(place.file, file.tell(), line))

    def _rows(self, path: Path, place: Place) -> Iterator[Document]:
        with open_parquet(path) as file:
            if self.column not in file.schema_arrow.names:
                raise DataError(
                    f"{path}: there is no column {self.column!r}",
                    f"Say by --column which one has the text: "
                    f"{', '.join(file.schema_arrow.names)}.",
                )
            row = 0
            for batch in file.iter_batches(_ROWS, columns=[self.column]):
                for text in batch.column(0).to_pylist():
                    row += 1
                    if row <= place.offset or text is None:
                        continue
                    if not isinstance(text, str):
                        raise DataError(f"{path}: column {self.column!r} is not text")
                    if text.strip():
                        yield Document(text, f"{path}, row {row}", Place(place.file, row))


def rows_of(path: Path) -> int:
    """Return the number of rows of a Parquet file; 0 if it cannot be read, which reading tells."""
    try:
        with open_parquet(path) as file:
            return int(file.metadata.num_rows)
    except (OSError, DataError, EnvironmentProblem):
        return 0


def find_documents(sources: Sequence[str]) -> tuple[Path, ...]:
    """Return the files of ``sources``: files, folders and glob patterns; sorted within each.

    Raises:
        DataError: a source names no file with documents.
    """
    found: list[Path] = []
    for source in sources:
        path = Path(source)
        if path.is_dir():
            files = [each for each in path.rglob("*") if _has_documents(each)]
        elif path.exists():
            files = [path]
        else:
            files = [each for each in Path().glob(source) if _has_documents(each)]
        if not files:
            raise DataError(
                f"{source}: no file ends in {', '.join(ENDINGS)}",
                f"Paths are relative to the working directory, {Path.cwd()}.",
            )
        found += sorted(files)
    for path in found:
        if path.suffix.lower() not in ENDINGS:
            raise DataError(f"{path}: a file with documents ends in {', '.join(ENDINGS)}")
    return tuple(dict.fromkeys(found))


def _has_documents(path: Path) -> bool:
    return path.suffix.lower() in ENDINGS and not path.name.startswith(".") and path.is_file()


def _decoded(content: bytes, origin: str) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{origin}: not UTF-8: 0x{content[error.start]:02x}, {error.start} bytes further"
        ) from error


def _keys_of(record: object) -> str:
    return f"; it has {', '.join(record)}" if isinstance(record, dict) and record else ""
