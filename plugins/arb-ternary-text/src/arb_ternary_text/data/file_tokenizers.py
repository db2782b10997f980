"""Tokenizers from files: of the ``tokenizers`` library, and of sentencepiece.

Each library is imported when it is used.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from importlib import import_module
from typing import Any

import attrs

from arb_ternary.errors import DataError, EnvironmentProblem
from arb_ternary.plugins.discovery import install_command


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

    def _read(self) -> Any:
        try:
            library = import_module("tokenizers")
        except ImportError as error:
            raise EnvironmentProblem(
                "the tokenizer file needs the package `tokenizers`, which is not installed",
                install_command("arb-ternary-text[tokenizers]"),
            ) from error
        with _library_errors("the tokenizer file cannot be read"):
            tokenizer = library.Tokenizer.from_str(self.definition)
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

    def encode_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the ids, and the first character and the end of the text of each."""
        library = self._library
        with _library_errors("the text cannot be encoded"):
            encoding = library.encode(text, add_special_tokens=False)
        return list(encoding.ids), list(encoding.offsets)

    @cached_property
    def control_tokens(self) -> dict[str, int]:
        """Id of each control token, by its spelling."""
        added = self._library.get_added_tokens_decoder()
        return {token.content: number for number, token in added.items() if token.special}

    def token_text(self, token: int) -> str:
        """Return how the vocabulary spells a token."""
        return str(self._library.id_to_token(token) or "")

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

    def decode(self, ids: Sequence[int]) -> str:
        check_ids(ids, self.vocabulary_size)
        return str(self._library.DecodeIds([int(i) for i in ids]))

    def to_json(self) -> dict[str, Any]:
        return {"kind": "sentencepiece", "model": self.model}


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
