"""Turn documents into a folder of token ids, which runs map into memory.

The folder has ``tokens.bin``, the ids of all documents; ``tokens.json``, what they are, with a
checksum of each segment; and ``tokenizer.json``. It is written segment by segment.
``progress.json`` says how far it is, so that an interrupted preparation goes on to the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import attrs
import numpy as np
from numpy.typing import NDArray

from arb_ternary.errors import DataError, UsageProblem
from arb_ternary_text.data.digests import DIGEST_BYTES, DigestSet
from arb_ternary_text.data.documents import Corpus, Document, Place
from arb_ternary_text.data.file_tokenizers import FileTokenizer
from arb_ternary_text.data.tokenizers import (
    Tokenizer,
    base_tokenizer,
    encode_letters,
    special_tokens,
)
from arb_ternary_train.directory import write_json

TOKENS: Final = "tokens.bin"
INDEX: Final = "tokens.json"
TOKENIZER: Final = "tokenizer.json"
_PROGRESS: Final = "progress.json"
_DIGESTS: Final = "digests.bin"

#: Characters of the documents that are encoded at once.
_BATCH: Final = 1 << 21
#: Tokens of a segment.
SEGMENT: Final = 1 << 24


@attrs.frozen
class Segment:
    """A part of the tokens: how many, and their SHA-256 in hexadecimal."""

    tokens: int
    sha256: str


@attrs.frozen
class Prepared:
    """A folder of tokens, or how far it is.

    Attributes:
        dtype: integer type of the ids.
        settings: digest of what decides the ids: the files, the tokenizer and the options.
        place: how far the files were read.
        documents: documents in it.
        duplicates: documents that were equal to an earlier one and were left out.
        characters: characters of the documents in it.
        longest: tokens of the longest document.
        segments: the segments of the file, in order.
    """

    dtype: str
    settings: str
    place: Place = attrs.field(factory=Place)
    documents: int = 0
    duplicates: int = 0
    characters: int = 0
    longest: int = 0
    segments: tuple[Segment, ...] = ()

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return sum(segment.tokens for segment in self.segments)

    def table(self) -> list[tuple[str, str]]:
        """Return the counts as rows of text."""
        return [
            ("documents", f"{self.documents:,}"),
            ("duplicates left out", f"{self.duplicates:,}"),
            ("tokens", f"{self.tokens:,}"),
            ("characters per token", f"{self.characters / max(1, self.tokens):.2f}"),
            ("longest document", f"{self.longest:,} tokens"),
        ]


def prepare(
    corpus: Corpus,
    tokenizer: Tokenizer,
    folder: Path,
    *,
    observe: Callable[[int], object] = lambda _: None,
    segment_tokens: int = SEGMENT,
) -> Prepared:
    """Write the tokens of all documents of ``corpus`` to ``folder``, or go on doing so.

    A document begins with BOS if the tokenizer adds it, and ends with its first end token if it has
    one. Letters that spell a control token are letters. Documents that are equal to an earlier one
    are left out: a digest of 16 bytes per document is kept on disk. Memory is bounded.

    Args:
        corpus: the documents.
        tokenizer: text to ids.
        folder: where to write.
        observe: called with the bytes (rows of a Parquet file) read since the last call.
        segment_tokens: least number of tokens of a segment, except for the last.

    Raises:
        UsageProblem: ``folder`` has other files, or was begun with other files or options.
        DataError: a document cannot be read or encoded, or there is none.
    """
    settings = _settings(corpus, tokenizer)
    dtype = str(np.min_scalar_type(tokenizer.vocabulary_size - 1))
    finished = _read(folder / INDEX)
    if finished is not None:
        return _same(finished, settings, folder)
    state = _read(folder / _PROGRESS)
    if state is None:
        _begin(folder, tokenizer)
        state = Prepared(dtype, settings)
        write_json(folder / _PROGRESS, attrs.asdict(state))
    else:
        state = _same(state, settings, folder)
    _truncate(folder, state)

    special = special_tokens(tokenizer)
    before = np.array(special.prefix, dtype=np.int32)
    after = np.array(special.eos[:1], dtype=np.int32)
    with (
        (folder / TOKENS).open("ab") as tokens,
        (folder / _DIGESTS).open("ab") as digests,
        closing(_seen(folder)) as seen,
    ):
        segment = _OpenSegment()
        for batch in _batches(corpus.documents(state.place)):
            new, keys = _without_duplicates(batch, seen)
            lengths = []
            for ids in _encoded(tokenizer, [document.text for document in new]):
                whole = np.concatenate([before, ids, after]).astype(dtype)
                lengths.append(len(whole))
                segment.add(tokens, whole)
            digests.write(b"".join(keys))
            place = batch[-1].end
            observe(_distance(state.place, place))
            state = attrs.evolve(
                state,
                place=place,
                documents=state.documents + len(new),
                duplicates=state.duplicates + len(batch) - len(new),
                characters=state.characters + sum(len(document.text) for document in new),
                longest=max(state.longest, *lengths, 0),
            )
            if segment.tokens >= segment_tokens:
                state = _close_segment(folder, state, segment, tokens, digests)
                segment = _OpenSegment()
        if segment.tokens:
            state = _close_segment(folder, state, segment, tokens, digests)
    if not state.tokens:
        raise DataError(f"{', '.join(map(str, corpus.files))}: there is no document with text")
    write_json(folder / INDEX, attrs.asdict(state))
    (folder / _PROGRESS).unlink()
    (folder / _DIGESTS).unlink()
    return state


def read_index(folder: Path) -> Prepared:
    """Return what a folder of tokens has.

    Raises:
        DataError: it is not one, it is not complete, or its tokens are not those that were written.
    """
    found = _read(folder / INDEX)
    if found is None:
        if (folder / _PROGRESS).exists():
            raise DataError(
                f"{folder}: the tokens are not complete",
                "Give the command `arb data prepare` again; it goes on where it was.",
            )
        raise DataError(f"{folder}: there is no {INDEX}", "Make it by `arb data prepare`.")
    size = found.tokens * np.dtype(found.dtype).itemsize
    path = folder / TOKENS
    actual = path.stat().st_size if path.exists() else 0
    if actual != size:
        raise DataError(f"{path}: it has {actual:,} bytes, and {INDEX} says {size:,}")
    return found


# --- segments


@attrs.define
class _OpenSegment:
    """The segment that is being written."""

    tokens: int = 0
    hasher: Any = attrs.field(factory=hashlib.sha256)

    def add(self, file: Any, ids: NDArray[Any]) -> None:
        content = ids.astype(ids.dtype.newbyteorder("<")).tobytes()
        file.write(content)
        self.hasher.update(content)
        self.tokens += len(ids)


def _close_segment(
    folder: Path, state: Prepared, segment: _OpenSegment, tokens: Any, digests: Any
) -> Prepared:
    """Make a segment permanent: first its bytes, then the record of it."""
    for file in (tokens, digests):
        file.flush()
        os.fsync(file.fileno())
    done = Segment(segment.tokens, segment.hasher.hexdigest())
    state = attrs.evolve(state, segments=(*state.segments, done))
    write_json(folder / _PROGRESS, attrs.asdict(state))
    return state


def _truncate(folder: Path, state: Prepared) -> None:
    """Drop what was written after the last whole segment."""
    sizes = {
        folder / TOKENS: state.tokens * np.dtype(state.dtype).itemsize,
        folder / _DIGESTS: state.documents * DIGEST_BYTES,
    }
    for path, size in sizes.items():
        path.touch()
        if path.stat().st_size < size:
            raise DataError(f"{path}: it is shorter than {_PROGRESS} says", "Delete the folder.")
        os.truncate(path, size)


def _seen(folder: Path) -> DigestSet:
    """Return the set of the digests of the documents before the last whole segment."""
    seen = DigestSet(folder)
    with (folder / _DIGESTS).open("rb") as file:
        while digest := file.read(DIGEST_BYTES):
            seen.add(digest)
    return seen


# --- documents


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document.text)
        if characters >= _BATCH:
            yield batch
            batch = []
            characters = 0
    if batch:
        yield batch


def _without_duplicates(
    batch: list[Document], seen: DigestSet
) -> tuple[list[Document], list[bytes]]:
    """Return the documents that are new, and their digests, which become ``seen``."""
    new = []
    keys = []
    for document in batch:
        content = document.text.encode("utf-8", errors="surrogatepass")
        key = hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()
        if seen.add(key):
            new.append(document)
            keys.append(key)
    return new, keys


def _encoded(tokenizer: Tokenizer, texts: list[str]) -> Iterator[NDArray[np.int32]]:
    base = base_tokenizer(tokenizer)
    if isinstance(base, FileTokenizer):
        yield from base.encode_letters_of(texts)
        return
    for text in texts:
        yield np.array(encode_letters(tokenizer, text), dtype=np.int32)


def _distance(before: Place, after: Place) -> int:
    """Return the bytes read between two places; the rest of a file that was ended is left out."""
    return after.offset - (before.offset if before.file == after.file else 0)


# --- the folder


def _begin(folder: Path, tokenizer: Tokenizer) -> None:
    if folder.exists() and any(folder.iterdir()):
        raise UsageProblem(
            f"{folder}: there are other files in it", "Give the name of a new folder."
        )
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / TOKENIZER, tokenizer.to_json())


def _settings(corpus: Corpus, tokenizer: Tokenizer) -> str:
    parts = {
        "files": [[str(file.resolve()), file.stat().st_size] for file in corpus.files],
        "column": corpus.column,
        "separator": corpus.separator,
        "tokenizer": tokenizer.to_json(),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _same(state: Prepared, settings: str, folder: Path) -> Prepared:
    if state.settings != settings:
        raise UsageProblem(
            f"{folder}: it was begun with other files, another tokenizer or other options",
            "Give the name of a new folder.",
        )
    return state


def _read(path: Path) -> Prepared | None:
    if not path.exists():
        return None
    try:
        state: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return Prepared(
            **{
                **state,
                "place": Place(**state["place"]),
                "segments": tuple(Segment(**each) for each in state["segments"]),
            }
        )
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DataError(f"{path}: it is damaged: {error}", "Delete the folder.") from error
