"""Text to token ids and back: bytes, characters, or a tokenizer file.

A config names a tokenizer by ``bytes``, ``characters`` or the path of a ``.json`` file (a file of the ``tokenizers``
library, or what ``to_json`` of any tokenizer here gave). ``from_json(tokenizer.to_json())`` is always the same
tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

import attrs
import numpy as np
from numpy.typing import NDArray

from arb_ternary.config.options import Rule
from arb_ternary.errors import DataError, EnvironmentProblem

__all__ = [
    "TOKENIZER_HELP",
    "ByteTokenizer",
    "CharacterTokenizer",
    "FileTokenizer",
    "IdTokenizer",
    "Tokenizer",
    "UnknownCharacterError",
    "build_tokenizer",
    "encode_stream",
    "from_json",
    "load_tokenizer",
    "tokenizer_name",
]

#: Help text of an option that names the tokenizer of a text.
TOKENIZER_HELP: Final = "bytes, characters (those of the training text) or the path of a tokenizer's .json file"

#: Validator of an option that names a tokenizer.
tokenizer_name: Final = Rule(
    "bytes, characters or the path of a .json file",
    lambda value: value in {"bytes", "characters"} or value.endswith(".json"),
    {"anyOf": [{"enum": ["bytes", "characters"]}, {"pattern": r"\.json$"}]},
)


@runtime_checkable
class Tokenizer(Protocol):
    """Text to token ids and back."""

    @property
    def vocabulary_size(self) -> int: ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...

    def to_json(self) -> dict[str, Any]:
        """Everything needed to rebuild the tokenizer; stored in run directories."""
        ...


class UnknownCharacterError(DataError):
    """A text holds a character that the tokenizer has no id for.

    Attributes:
        character: the character.
        offset: where it first stands, in characters from the start of the text.
    """

    def __init__(self, character: str, offset: int, where: str = "the text", hint: str = "") -> None:
        super().__init__(
            f"{where}: character {character!r} (U+{ord(character):04X}) at offset {offset} is not in the "
            "tokenizer's alphabet",
            hint or "Use `tokenizer: bytes`, which can write any text.",
        )
        self.character = character
        self.offset = offset


@attrs.frozen
class ByteTokenizer:
    """The bytes of the UTF-8 text; 256 ids."""

    @property
    def vocabulary_size(self) -> int:
        return 256

    def encode(self, text: str) -> list[int]:
        return list(self._bytes(text))

    def encode_array(self, text: str) -> NDArray[np.uint8]:
        """``encode`` as a uint8 array."""
        return np.frombuffer(self._bytes(text), dtype=np.uint8)

    def decode(self, ids: Sequence[int]) -> str:
        """The text; bytes that are not UTF-8 (a character cut in two) read as U+FFFD."""
        _check_ids(ids, 256)
        return bytes(ids).decode("utf-8", errors="replace")

    def to_json(self) -> dict[str, Any]:
        return {"kind": "bytes"}

    @staticmethod
    def _bytes(text: str) -> bytes:
        try:
            return text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UnknownCharacterError(
                text[error.start], error.start, hint="It is half of a surrogate pair and has no UTF-8 form."
            ) from error


@attrs.frozen
class CharacterTokenizer:
    """One id for each character of an alphabet, in the order of code points.

    Attributes:
        alphabet: the distinct characters, sorted.
    """

    alphabet: str = attrs.field()

    @alphabet.validator
    def _sorted_and_distinct(self, _: object, value: str) -> None:
        if not value:
            raise DataError("character tokenizer: the alphabet is empty")
        if value != "".join(sorted(set(value))):
            raise DataError("character tokenizer: the alphabet must be distinct characters in the order of code points")

    @classmethod
    def from_text(cls, text: str) -> CharacterTokenizer:
        """The tokenizer whose alphabet is what ``text`` uses: the same for any order of the same characters."""
        return cls("".join(sorted(set(text))))

    @property
    def vocabulary_size(self) -> int:
        return len(self.alphabet)

    def encode(self, text: str) -> list[int]:
        return [int(i) for i in self.encode_array(text)]

    def encode_array(self, text: str) -> NDArray[np.int64]:
        """``encode`` as an int64 array.

        Raises:
            UnknownCharacterError: a character of ``text`` is not in the alphabet.
        """
        known = _code_points(self.alphabet)
        wanted = _code_points(text)
        ids = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
        wrong = np.flatnonzero(known[ids] != wanted)
        if len(wrong):
            raise UnknownCharacterError(text[int(wrong[0])], int(wrong[0]))
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        _check_ids(ids, self.vocabulary_size)
        return "".join([self.alphabet[i] for i in ids])

    def to_json(self) -> dict[str, Any]:
        return {"kind": "characters", "alphabet": self.alphabet}


@attrs.frozen
class IdTokenizer:
    """Token ids written as numbers: for token files whose tokenizer is not known here.

    Attributes:
        vocabulary_size: number of ids.
    """

    vocabulary_size: int = attrs.field(validator=[attrs.validators.instance_of(int), attrs.validators.ge(1)])

    def encode(self, text: str) -> list[int]:
        """The ids in ``text``, whole numbers apart by white space."""
        words = text.split()
        for word in words:
            if not (word.isascii() and word.isdigit()):
                raise DataError(
                    f"{word!r} is not a token id: this data has no tokenizer, so text is written as numbers",
                    'Write ids such as "12 7 300", or set the tokenizer of the data.',
                )
        ids = [int(word) for word in words]
        _check_ids(ids, self.vocabulary_size)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        _check_ids(ids, self.vocabulary_size)
        return " ".join(str(i) for i in ids)

    def to_json(self) -> dict[str, Any]:
        return {"kind": "ids", "vocabulary_size": self.vocabulary_size}


@attrs.frozen
class FileTokenizer:
    """A tokenizer of the ``tokenizers`` library, from the text of its JSON file.

    Special tokens are neither added when encoding nor left out when decoding, and the file's truncation and padding are
    switched off: a stream must keep every token of the text. What becomes of text that the file has no token for
    is the file's own rule.

    Attributes:
        definition: the whole text of the JSON file.
    """

    definition: str = attrs.field(repr=lambda text: f"<{len(text)} characters>")

    @cached_property
    def _library(self) -> Any:
        try:
            library = import_module("tokenizers")
        except ImportError as error:
            raise EnvironmentProblem(
                "the tokenizer file needs the package `tokenizers`, which is not installed",
                "pip install 'arb-ternary-text[tokenizers]'",
            ) from error
        try:
            tokenizer = library.Tokenizer.from_str(self.definition)
        except Exception as error:  # the library raises bare Exception for a file that it cannot read
            raise DataError(f"the tokenizer file cannot be read by the package `tokenizers`: {error}") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    @cached_property
    def vocabulary_size(self) -> int:
        """The largest id plus one: ids need not be contiguous, and an embedding must hold every one."""
        return max(self._library.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode(self, text: str) -> list[int]:
        return list(self._library.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        _check_ids(ids, self.vocabulary_size)
        return str(self._library.decode([int(i) for i in ids], skip_special_tokens=False))

    def to_json(self) -> dict[str, Any]:
        return {"kind": "file", "definition": self.definition}


def build_tokenizer(choice: str, training_text: str | None = None) -> Tokenizer:
    """The tokenizer that a config names.

    Args:
        choice: ``bytes``, ``characters`` or the path of a ``.json`` file.
        training_text: the text that the characters are taken from; None where the data is not text.

    Raises:
        DataError: the choice is none of these, there is no text to take characters from, or the file cannot be read.
        EnvironmentProblem: the file needs a package that is not installed.
    """
    if choice == "bytes":
        return ByteTokenizer()
    if choice == "characters":
        if training_text is None:
            raise DataError(
                "tokenizer: characters are taken from a training text, and token files have none",
                "Give the path of the tokenizer's .json file.",
            )
        return CharacterTokenizer.from_text(training_text)
    if choice.endswith(".json"):
        return load_tokenizer(choice)
    raise DataError(f"tokenizer: {choice!r} is neither bytes, characters nor the path of a .json file")


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer in a JSON file: one of the ``tokenizers`` library, or one that ``to_json`` gave.

    Raises:
        DataError: the file is missing, is not JSON or holds no tokenizer; the path comes first.
        EnvironmentProblem: the file needs a package that is not installed.
    """
    try:
        definition = Path(path).read_text(encoding="utf-8")
        found = json.loads(definition)
    except OSError as error:
        raise DataError(f"{path}: the tokenizer file cannot be read: {error.strerror}") from error
    except ValueError as error:  # of both the UTF-8 decoder and the JSON parser
        raise DataError(f"{path}: the tokenizer file is not JSON: {error}") from error
    try:
        if isinstance(found, dict) and "kind" in found:
            return from_json(found)
        if isinstance(found, dict) and "model" in found:
            return _ready(FileTokenizer(definition))
    except DataError as error:
        raise DataError(f"{path}: {error.what}", error.hint) from error
    except EnvironmentProblem as error:
        raise EnvironmentProblem(f"{path}: {error.what}", error.hint) from error
    raise DataError(
        f"{path}: this JSON holds no tokenizer: it has neither `model` (a file of the package `tokenizers`) nor `kind`"
    )


def from_json(state: Mapping[str, Any]) -> Tokenizer:
    """Rebuild a tokenizer from what its ``to_json`` gave.

    Raises:
        DataError: ``state`` is no tokenizer's, or its fields are not those of its kind.
        EnvironmentProblem: the tokenizer needs a package that is not installed.
    """
    kinds: dict[str, tuple[type[Any], str | None, type]] = {
        "bytes": (ByteTokenizer, None, object),
        "characters": (CharacterTokenizer, "alphabet", str),
        "ids": (IdTokenizer, "vocabulary_size", int),
        "file": (FileTokenizer, "definition", str),
    }
    kind = state.get("kind")
    if kind not in kinds:
        raise DataError(f"tokenizer: kind must be one of {', '.join(kinds)}, not {kind!r}")
    make, name, type_ = kinds[kind]
    fields = {key: value for key, value in state.items() if key != "kind"}
    expected = [name] if name else []
    if sorted(fields) != expected or not all(isinstance(value, type_) for value in fields.values()):
        holds = f"one field, {name} ({type_.__name__})" if name else "no further field"
        raise DataError(f"tokenizer: kind {kind} has {holds}; these were given: {', '.join(sorted(fields)) or 'none'}")
    try:
        return _ready(make(**fields))
    except ValueError as error:
        raise DataError(f"tokenizer: kind {kind}: {error}") from error


@runtime_checkable
class _EncodesArrays(Protocol):
    def encode_array(self, text: str) -> NDArray[Any]: ...


def encode_stream(tokenizer: Tokenizer, text: str) -> NDArray[Any]:
    """``text`` as a one-dimensional array of ids in the smallest unsigned dtype that holds the vocabulary."""
    if isinstance(tokenizer, _EncodesArrays):
        ids = tokenizer.encode_array(text)
    else:
        ids = np.asarray(tokenizer.encode(text), dtype=np.int64)
    return np.asarray(ids, dtype=np.min_scalar_type(tokenizer.vocabulary_size - 1))


def _ready(tokenizer: Tokenizer) -> Tokenizer:
    """``tokenizer``, once it is known to work: a file that cannot be used is an error here, not at the first batch."""
    if tokenizer.vocabulary_size < 1:
        raise DataError("tokenizer: the vocabulary is empty")
    return tokenizer


def _code_points(text: str) -> NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), dtype="<u4")


def _check_ids(ids: Sequence[int], size: int) -> None:
    for place, i in enumerate(ids):
        if not 0 <= i < size:
            raise DataError(f"token id {i} at place {place} is outside the vocabulary: 0 to {size - 1}")
