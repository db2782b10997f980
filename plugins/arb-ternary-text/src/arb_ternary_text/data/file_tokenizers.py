"""Tokenizers from files: of the ``tokenizers`` library, and of sentencepiece.

Each library is imported when it is used.
"""

from __future__ import annotations

import json
import re
from base64 import b64decode, b64encode
from bisect import bisect_left
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from importlib import import_module
from typing import Any, Final

import attrs
import numpy as np
from numpy.typing import NDArray

from arb_ternary.errors import DataError, EnvironmentProblem
from arb_ternary.plugins.discovery import install_command

#: Characters of a text that are encoded at once, and those around them.
_PART: Final = 1 << 20
_MARGIN: Final = 1 << 12
#: Tokens about which two parts have to agree.
_AGREEING: Final = 16
#: First of the private characters that stand for control tokens in :meth:`encode_apart`.
_PRIVATE: Final = 0x100000


@attrs.frozen
class FileTokenizer:
    """A tokenizer of the ``tokenizers`` library, from the text of its JSON file.

    Special tokens are neither added when encoding nor left out when decoding, and truncation and
    padding are switched off, because a stream must keep every token of the text. The file itself
    says what becomes of text that it has no token for.

    Attributes:
        definition: the whole text of the JSON file.
    """

    definition: str = attrs.field(repr=lambda text: f"<{len(text)} characters>")

    @cached_property
    def _library(self) -> Any:
        return self._read()

    def _read(self, definition: str | None = None) -> Any:
        """Return the library's tokenizer of ``definition``; None = of the file."""
        try:
            library = import_module("tokenizers")
        except ImportError as error:
            raise EnvironmentProblem(
                "the tokenizer file needs the package `tokenizers`, which is not installed",
                install_command("arb-ternary-text[tokenizers]"),
            ) from error
        with _library_errors("the tokenizer file cannot be read"):
            tokenizer = library.Tokenizer.from_str(definition or self.definition)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    @cached_property
    def _letters(self) -> Any:
        """The tokenizer for text without control tokens."""
        tokenizer = self._read()
        tokenizer.encode_special_tokens = True
        return tokenizer

    @cached_property
    def vocabulary_size(self) -> int:
        """The largest id plus one, because ids need not be contiguous."""
        return max(self._library.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode(self, text: str) -> list[int]:
        return self._ids(self._library, text)

    def encode_letters(self, text: str) -> list[int]:
        """Encode text in which the spelling of a control token is text like any other."""
        return self._ids(self._letters, text)

    def encode_letters_of(self, texts: Sequence[str]) -> Iterator[NDArray[np.int32]]:
        """Yield :meth:`encode_letters` of each text as an array.

        The library uses all threads. It takes some 170 bytes per character, so long texts are
        encoded part by part.
        """
        short = [text for text in texts if len(text) <= _PART]
        with _library_errors("a text cannot be encoded"):
            found = iter(self._letters.encode_batch(short, add_special_tokens=False))
        for text in texts:
            if len(text) <= _PART:
                yield np.array(next(found).ids, dtype=np.int32)
            else:
                yield self._encode_in_parts(text)

    def _encode_in_parts(self, text: str) -> NDArray[np.int32]:
        """Encode a long text: each part with the characters around it, whose tokens are dropped.

        A part begins at a token at which the part before ends. Where the two do not agree about
        the tokens before it, the text is encoded as a whole.
        """
        parts: list[NDArray[np.int32]] = []
        begin = 0
        expected: list[int] = []
        while begin < len(text):
            first = max(0, begin - _MARGIN)
            end = begin + _PART
            ids, offsets = _encode_offsets(self._letters, text[first : end + _MARGIN])
            starts = [first + start for start, _ in offsets]
            low = bisect_left(starts, begin)
            agrees = ids[max(0, low - _AGREEING) : low] == expected
            high = len(ids) if end + _MARGIN >= len(text) else bisect_left(starts, end)
            if not agrees or (high < len(ids) and high - low < _AGREEING):
                return np.array(self.encode_letters(text), dtype=np.int32)
            parts.append(np.array(ids[low:high], dtype=np.int32))
            expected = ids[high - _AGREEING : high]
            begin = starts[high] if high < len(ids) else len(text)
        return np.concatenate(parts)

    def encode_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the ids, and the first character and the end of the text of each."""
        return _encode_offsets(self._library, text)

    def encode_apart(
        self, text: str, letters: Container[int]
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the same of a text in which some spelled control tokens are letters.

        Args:
            text: the text.
            letters: the first character of each control token that is letters.

        Raises:
            DataError: the text has a private character that stands for a control token.
        """
        library, private, ids = self._private
        foreign = set(private.values()).intersection(text)
        if foreign:
            raise DataError(
                f"the text has the private character U+{ord(min(foreign)):04X} beside letters "
                f"that spell a control token"
            )
        longest_first = sorted(private, key=len, reverse=True)
        pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        pieces: list[str] = []
        ends = [0]  # of each character of the pieces, in the text
        while found := pattern.search(text, ends[-1]):
            control = found.start() not in letters
            plain_end = found.start() if control else found.start() + 1
            pieces.append(text[ends[-1] : plain_end])
            ends.extend(range(ends[-1] + 1, plain_end + 1))
            if control:
                pieces.append(private[found[0]])
                ends.append(found.end())
        pieces.append(text[ends[-1] :])
        ends.extend(range(ends[-1] + 1, len(text) + 1))
        found_ids, offsets = _encode_offsets(library, "".join(pieces))
        return (
            [ids.get(each, each) for each in found_ids],
            [(ends[start], ends[end]) for start, end in offsets],
        )

    @cached_property
    def _private(self) -> tuple[Any, dict[str, str], dict[int, int]]:
        """The tokenizer with a private character in the place of each control token's text.

        Also the character of each token, and the id that the character's id stands for.
        """
        definition = json.loads(self.definition)
        private: dict[str, str] = {}
        for number, token in enumerate(definition.get("added_tokens", [])):
            if token["special"]:
                private[token["content"]] = chr(_PRIVATE + number)
                token["content"] = chr(_PRIVATE + number)
        library = self._read(json.dumps(definition))
        ids = {library.token_to_id(private[text]): self.control_tokens[text] for text in private}
        return library, private, ids

    @cached_property
    def control_tokens(self) -> dict[str, int]:
        """Id of each control token, by its spelling."""
        added = self._library.get_added_tokens_decoder()
        return {token.content: number for number, token in added.items() if token.special}

    def token_text(self, token: int) -> str:
        """Return how the vocabulary spells a token."""
        return str(self._library.id_to_token(token) or "")

    def token_id(self, text: str) -> int | None:
        """Return the id of the token that is spelled ``text``; None if there is none."""
        found = self._library.token_to_id(text)
        return None if found is None else int(found)

    def adds(self, bos: int | None, eos: int | None) -> tuple[bool, bool]:
        """Return whether the file itself puts ``bos`` before a text, and ``eos`` behind it."""
        library = self._library
        with _library_errors("a text cannot be encoded"):
            ids = library.encode("a", add_special_tokens=True).ids
            plain = library.encode("a", add_special_tokens=False).ids
        if ids == plain or not ids:
            return False, False
        return ids[0] == bos, ids[-1] == eos

    @staticmethod
    def _ids(library: Any, text: str) -> list[int]:
        with _library_errors("the text cannot be encoded"):
            return list(library.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        check_ids(ids, self.vocabulary_size)
        library = self._library
        with _library_errors("the ids cannot be decoded"):
            return str(library.decode([int(i) for i in ids], skip_special_tokens=False))

    def to_json(self) -> dict[str, Any]:
        return {"kind": "file", "definition": self.definition}


@attrs.frozen
class SentencePieceTokenizer:
    """A tokenizer of sentencepiece, from the bytes of its ``.model`` file.

    No ids of beginning and end are added. The file itself says how text is normalised, and what
    becomes of characters that the model has no piece for. With byte fallback, decoding gives back
    the normalised text.

    Attributes:
        model: the whole file in base64.
    """

    model: str = attrs.field(repr=lambda text: f"<{len(text)} characters>")

    @classmethod
    def from_bytes(cls, content: bytes) -> SentencePieceTokenizer:
        """Return the tokenizer of a file with this content."""
        return cls(b64encode(content).decode("ascii"))

    @cached_property
    def _library(self) -> Any:
        try:
            library = import_module("sentencepiece")
        except ImportError as error:
            raise EnvironmentProblem(
                "the tokenizer file needs the package `sentencepiece`, which is not installed",
                install_command("arb-ternary-text[sentencepiece]"),
            ) from error
        try:
            content = b64decode(self.model, validate=True)
        except ValueError as error:
            raise DataError(f"the sentencepiece model is not base64: {error}") from error
        if not content:
            raise DataError("the sentencepiece model is empty")
        processor = library.SentencePieceProcessor()
        try:
            processor.LoadFromSerializedProto(content)
        except (RuntimeError, ValueError, TypeError) as error:
            raise DataError(
                f"the tokenizer file cannot be read by the package `sentencepiece`: {error}"
            ) from error
        return processor

    @cached_property
    def vocabulary_size(self) -> int:
        """Number of pieces."""
        return int(self._library.GetPieceSize())

    def encode(self, text: str) -> list[int]:
        return [int(i) for i in self._library.EncodeAsIds(text)]

    def token_text(self, token: int) -> str:
        """Return how the vocabulary spells a token."""
        return str(self._library.IdToPiece(token))

    def roles(self) -> dict[str, str]:
        """Return the pieces with a role in a text: ``unk``, ``bos``, ``eos`` and ``pad``."""
        library = self._library
        ids = {
            "unk": library.unk_id(),
            "bos": library.bos_id(),
            "eos": library.eos_id(),
            "pad": library.pad_id(),
        }
        return {role: self.token_text(token) for role, token in ids.items() if token >= 0}

    def decode(self, ids: Sequence[int]) -> str:
        check_ids(ids, self.vocabulary_size)
        return str(self._library.DecodeIds([int(i) for i in ids]))

    def to_json(self) -> dict[str, Any]:
        return {"kind": "sentencepiece", "model": self.model}


def _encode_offsets(library: Any, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    with _library_errors("the text cannot be encoded"):
        encoding = library.encode(text, add_special_tokens=False)
    return list(encoding.ids), list(encoding.offsets)


@contextmanager
def _library_errors(what: str) -> Iterator[None]:
    """Turn errors of the package ``tokenizers`` into DataError.

    It raises bare ``Exception``, and panics of its Rust code.
    """
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise DataError(f"{what} by the package `tokenizers`: {error}") from error


def check_ids(ids: Sequence[int], size: int) -> None:
    """Raise DataError if an id is not one of ``0 .. size - 1``."""
    for index, i in enumerate(ids):
        if not 0 <= i < size:
            raise DataError(
                f"token id {i} at index {index} is outside the vocabulary: 0 to {size - 1}"
            )
