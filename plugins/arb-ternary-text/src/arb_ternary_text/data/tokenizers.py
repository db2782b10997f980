"""Text to token ids and back: bytes, characters, or a tokenizer file.

A config names a tokenizer by ``bytes``, ``characters`` or the path of a file: ``.json`` (of the
``tokenizers`` library, or the result of ``to_json`` of a tokenizer here) or ``.model`` (of
sentencepiece). ``from_json(tokenizer.to_json())`` is always the same tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

import attrs
import numpy as np
from numpy.typing import NDArray

from arb_ternary.config.options import Rule
from arb_ternary.errors import DataError, EnvironmentProblem
from arb_ternary_text.data.file_tokenizers import FileTokenizer, SentencePieceTokenizer, check_ids
from arb_ternary_text.data.special_tokens import NO_SPECIAL_TOKENS, SpecialTokens

#: Help text of an option that names the tokenizer of a text.
TOKENIZER_HELP: Final = (
    "bytes, characters (those of the training text) or the path of a "
    "tokenizer's .json or .model file"
)

#: Validator of an option that names a tokenizer.
tokenizer_name: Final = Rule(
    "bytes, characters or the path of a .json or .model file",
    lambda value: value in {"bytes", "characters"} or value.endswith((".json", ".model")),
    {"anyOf": [{"enum": ["bytes", "characters"]}, {"pattern": r"\.(json|model)$"}]},
)


@runtime_checkable
class Tokenizer(Protocol):
    """Text to token ids and back."""

    @property
    def vocabulary_size(self) -> int: ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...

    def to_json(self) -> dict[str, Any]:
        """Return everything needed to rebuild the tokenizer; run directories store it."""
        ...


class UnknownCharacterError(DataError):
    """A text contains a character that the tokenizer has no id for.

    Attributes:
        character: the character.
        offset: its first offset, in characters from the start of the text.
    """

    def __init__(
        self, character: str, offset: int, where: str = "the text", hint: str = ""
    ) -> None:
        super().__init__(
            f"{where}: character {character!r} (U+{ord(character):04X}) at offset {offset} is not "
            "in the tokenizer's alphabet",
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
        """Encode to a uint8 array."""
        return np.frombuffer(self._bytes(text), dtype=np.uint8)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text; bytes that are not UTF-8 (a character cut in two) become U+FFFD."""
        check_ids(ids, 256)
        return bytes(ids).decode("utf-8", errors="replace")

    def to_json(self) -> dict[str, Any]:
        return {"kind": "bytes"}

    @staticmethod
    def _bytes(text: str) -> bytes:
        try:
            return text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UnknownCharacterError(
                text[error.start],
                error.start,
                hint="It is half of a surrogate pair, which UTF-8 cannot write.",
            ) from error


@attrs.frozen
class CharacterTokenizer:
    """One id per character of an alphabet, in the order of code points.

    Attributes:
        alphabet: the distinct characters, sorted.
    """

    alphabet: str = attrs.field()

    @alphabet.validator
    def _sorted_and_distinct(self, _: object, value: str) -> None:
        if not value:
            raise DataError("character tokenizer: the alphabet is empty")
        if value != "".join(sorted(set(value))):
            raise DataError(
                "character tokenizer: the alphabet must be distinct characters in the order of "
                "code points"
            )

    @classmethod
    def from_text(cls, text: str) -> CharacterTokenizer:
        """Return the tokenizer whose alphabet is the characters of ``text``."""
        return cls("".join(sorted(set(text))))

    @property
    def vocabulary_size(self) -> int:
        return len(self.alphabet)

    def encode(self, text: str) -> list[int]:
        return [int(i) for i in self.encode_array(text)]

    def encode_array(self, text: str) -> NDArray[np.int64]:
        """Encode to an int64 array.

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
        check_ids(ids, self.vocabulary_size)
        return "".join([self.alphabet[i] for i in ids])

    def to_json(self) -> dict[str, Any]:
        return {"kind": "characters", "alphabet": self.alphabet}


@attrs.frozen
class IdTokenizer:
    """Token ids written as numbers, for token files whose tokenizer is not known.

    Attributes:
        vocabulary_size: number of ids.
    """

    vocabulary_size: int = attrs.field(
        validator=[attrs.validators.instance_of(int), attrs.validators.ge(1)]
    )

    def encode(self, text: str) -> list[int]:
        """Return the ids in ``text``, whole numbers separated by white space."""
        words = text.split()
        for word in words:
            if not (word.isascii() and word.isdigit()):
                raise DataError(
                    f"{word!r} is not a token id: this data has no tokenizer, so text must be "
                    f"numbers",
                    'Write ids such as "12 7 300", or set the tokenizer of the data.',
                )
        ids = [int(word) for word in words]
        check_ids(ids, self.vocabulary_size)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        check_ids(ids, self.vocabulary_size)
        return " ".join(str(i) for i in ids)

    def to_json(self) -> dict[str, Any]:
        return {"kind": "ids", "vocabulary_size": self.vocabulary_size}


@attrs.frozen
class PaddedTokenizer:
    """A tokenizer with additional ids: the rows of published embeddings are often rounded up.

    Attributes:
        inner: the tokenizer. No text encodes to the additional ids.
        vocabulary_size: number of ids, more than the inner tokenizer's.
    """

    inner: Tokenizer
    vocabulary_size: int = attrs.field(validator=attrs.validators.instance_of(int))

    @vocabulary_size.validator
    def _larger(self, _: object, value: int) -> None:
        if value <= self.inner.vocabulary_size:
            raise DataError(
                f"tokenizer: padded to {value} ids, but it has {self.inner.vocabulary_size} already"
            )

    def encode(self, text: str) -> list[int]:
        return self.inner.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text; runs of additional ids become U+FFFD."""
        check_ids(ids, self.vocabulary_size)
        known = self.inner.vocabulary_size
        pieces = []
        for is_known, run in groupby(ids, key=lambda i: i < known):
            pieces.append(self.inner.decode(list(run)) if is_known else "\ufffd")
        return "".join(pieces)

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": "padded",
            "tokenizer": self.inner.to_json(),
            "vocabulary_size": self.vocabulary_size,
        }


@attrs.frozen
class LanguageTokenizer:
    """A tokenizer that knows the special tokens and the chat template of its model.

    Attributes:
        inner: the tokenizer.
        special: its special tokens and template.
    """

    inner: Tokenizer
    special: SpecialTokens

    @property
    def vocabulary_size(self) -> int:
        return self.inner.vocabulary_size

    def encode(self, text: str) -> list[int]:
        return self.inner.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self.inner.decode(list(ids))

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": "language",
            "tokenizer": self.inner.to_json(),
            "special": self.special.to_json(),
        }


def base_tokenizer(tokenizer: Tokenizer) -> Tokenizer:
    """Return the tokenizer inside ``tokenizer``, without padding and special tokens."""
    while isinstance(tokenizer, PaddedTokenizer | LanguageTokenizer):
        tokenizer = tokenizer.inner
    return tokenizer


def base_state(state: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return the same of the result of ``to_json``; None for None."""
    while state is not None and state.get("kind") in ("padded", "language"):
        state = state["tokenizer"]
    return state


def special_tokens(tokenizer: Tokenizer) -> SpecialTokens:
    """Return the special tokens of ``tokenizer``; bytes and characters have none."""
    return tokenizer.special if isinstance(tokenizer, LanguageTokenizer) else NO_SPECIAL_TOKENS


def encode_letters(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encode text in which no letters are a control token, whatever they spell.

    ``Tokenizer.encode`` reads the letters ``<|im_end|>`` as that token, if there is one, which is
    right for a text that a template has written. This is for what a user has typed.
    """
    base = base_tokenizer(tokenizer)
    return base.encode_letters(text) if isinstance(base, FileTokenizer) else base.encode(text)


def encode_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encode a text to continue: letters, behind BOS if the model begins every text with it."""
    return [*special_tokens(tokenizer).prefix, *encode_letters(tokenizer, text)]


def token_text(tokenizer: Tokenizer, token: int | None) -> str | None:
    """Return the text that stands for a control token in templates; None for None."""
    base = base_tokenizer(tokenizer)
    if token is None:
        return None
    if isinstance(base, FileTokenizer | SentencePieceTokenizer):
        return base.token_text(token)
    return base.decode([token])


def attached_tokenizer(attachments: Mapping[str, Any], source: str) -> Tokenizer:
    """Return the tokenizer that a run or a foreign model has among its attachments.

    Args:
        attachments: plain JSON by name.
        source: what the error names.

    Raises:
        DataError: there is none, or it is damaged.
    """
    if "tokenizer" not in attachments:
        raise DataError(
            f"{source}: there is no tokenizer with it, so there is no text to read or write",
            "A run has the tokenizer of its data; a file of weights alone has none. "
            "`arb import` makes a run of it whose config can name one.",
        )
    return from_json(attachments["tokenizer"])


def build_tokenizer(choice: str, training_text: str | None = None) -> Tokenizer:
    """Build the tokenizer that a config names.

    Args:
        choice: ``bytes``, ``characters`` or the path of a ``.json`` or ``.model`` file.
        training_text: the text that the characters are taken from; None if the data is not text.

    Raises:
        DataError: there is no text to take characters from, or the file cannot be read.
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
    return load_tokenizer(choice)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load a tokenizer from JSON (of the ``tokenizers`` library or ``to_json``) or ``.model``.

    Raises:
        DataError: the file is missing, is not JSON or has no tokenizer; the path comes first.
        EnvironmentProblem: the file needs a package that is not installed.
    """
    try:
        content = Path(path).read_bytes()
        definition = "" if str(path).endswith(".model") else content.decode("utf-8")
        found = None if str(path).endswith(".model") else json.loads(definition)
    except OSError as error:
        raise DataError(f"{path}: the tokenizer file cannot be read: {error.strerror}") from error
    except ValueError as error:  # of both the UTF-8 decoder and the JSON parser
        raise DataError(f"{path}: the tokenizer file is not JSON: {error}") from error
    try:
        if found is None and not definition:
            return _ready(SentencePieceTokenizer.from_bytes(content))
        if isinstance(found, dict) and "kind" in found:
            return from_json(found)
        if isinstance(found, dict) and "model" in found:
            return _ready(FileTokenizer(definition))
    except DataError as error:
        raise DataError(f"{path}: {error.what}", error.hint) from error
    except EnvironmentProblem as error:
        raise EnvironmentProblem(f"{path}: {error.what}", error.hint) from error
    raise DataError(
        f"{path}: this JSON is not a tokenizer: it has neither `model` (a file of the package "
        f"`tokenizers`) nor `kind`"
    )


def from_json(state: Mapping[str, Any]) -> Tokenizer:
    """Rebuild a tokenizer from the result of its ``to_json``.

    Raises:
        DataError: ``state`` is not of a tokenizer, or its fields are not those of its kind.
        EnvironmentProblem: the tokenizer needs a package that is not installed.
    """
    if not isinstance(state, Mapping):
        raise DataError("tokenizer.json: not a JSON object")
    if state.get("kind") == "padded":
        return _padded(state)
    if state.get("kind") == "language":
        return _language(state)
    kinds: dict[str, tuple[type[Any], str | None, type]] = {
        "bytes": (ByteTokenizer, None, object),
        "characters": (CharacterTokenizer, "alphabet", str),
        "ids": (IdTokenizer, "vocabulary_size", int),
        "file": (FileTokenizer, "definition", str),
        "sentencepiece": (SentencePieceTokenizer, "model", str),
    }
    kind = state.get("kind")
    if kind not in kinds:
        raise DataError(
            f"tokenizer.json: kind must be one of {', '.join(kinds)}, padded and language, not "
            f"{kind!r}"
        )
    make, name, type_ = kinds[kind]
    fields = {key: value for key, value in state.items() if key != "kind"}
    expected = [name] if name else []
    if sorted(fields) != expected or not all(isinstance(value, type_) for value in fields.values()):
        holds = f"one field, {name} ({type_.__name__})" if name else "no further field"
        given = ", ".join(sorted(fields)) or "none"
        raise DataError(f"tokenizer.json: kind {kind} has {holds}; these were given: {given}")
    try:
        return _ready(make(**fields))
    except ValueError as error:
        raise DataError(f"tokenizer.json: kind {kind}: {error}") from error


def padded_to(state: Mapping[str, Any] | None, vocabulary_size: int) -> dict[str, Any]:
    """Return the state of a tokenizer for a model with ``vocabulary_size`` ids.

    Args:
        state: the state of the tokenizer; None for ids written as numbers.
        vocabulary_size: number of ids of the model.

    Raises:
        DataError: the tokenizer has more ids than the model.
        EnvironmentProblem: the tokenizer needs a package that is not installed.
    """
    if state is None:
        return IdTokenizer(vocabulary_size).to_json()
    inner = from_json(state)
    ids = inner.vocabulary_size
    if ids > vocabulary_size:
        raise DataError(
            f"tokenizer: it has {ids} ids, but the model {vocabulary_size}",
            f"Give the model a row for each, where transformers is installed: "
            f"`model.resize_token_embeddings({ids})` and `model.save_pretrained(folder)`; or take "
            f"the {ids - vocabulary_size} last tokens out of the tokenizer's files; or move these "
            f"files out of the folder, and the run reads ids.",
        )
    if ids == vocabulary_size:
        return inner.to_json()
    if isinstance(inner, LanguageTokenizer):
        return attrs.evolve(inner, inner=PaddedTokenizer(inner.inner, vocabulary_size)).to_json()
    return PaddedTokenizer(inner, vocabulary_size).to_json()


def _padded(state: Mapping[str, Any]) -> Tokenizer:
    inner = state.get("tokenizer")
    size = state.get("vocabulary_size")
    if sorted(state) != ["kind", "tokenizer", "vocabulary_size"] or not isinstance(inner, Mapping):
        raise DataError(
            "tokenizer.json: kind padded has two fields, tokenizer (an object) and "
            "vocabulary_size (int)"
        )
    if inner.get("kind") in ("padded", "language") or type(size) is not int:
        raise DataError(
            "tokenizer.json: kind padded has a tokenizer of another kind, and a whole number of ids"
        )
    return PaddedTokenizer(from_json(inner), size)


def _language(state: Mapping[str, Any]) -> Tokenizer:
    inner = state.get("tokenizer")
    fits = sorted(state) == ["kind", "special", "tokenizer"]
    if not (fits and isinstance(inner, Mapping)) or inner.get("kind") == "language":
        raise DataError(
            "tokenizer.json: kind language has two fields, tokenizer (an object, of another kind) "
            "and special (an object)"
        )
    tokenizer = from_json(inner)
    return LanguageTokenizer(
        tokenizer, SpecialTokens.from_json(state["special"], tokenizer.vocabulary_size)
    )


def encode_stream(tokenizer: Tokenizer, text: str) -> NDArray[Any]:
    """Encode ``text`` to an array of ids, in the smallest unsigned dtype for the vocabulary."""
    encode_array = getattr(tokenizer, "encode_array", None)  # faster, if there is one
    if encode_array is None:
        ids = np.asarray(tokenizer.encode(text), dtype=np.int64)
    else:
        ids = encode_array(text)
    return np.asarray(ids, dtype=np.min_scalar_type(tokenizer.vocabulary_size - 1))


def _ready(tokenizer: Tokenizer) -> Tokenizer:
    """Return the tokenizer, after checking that it works.

    A file that cannot be used is then an error here and not at the first batch.
    """
    if tokenizer.vocabulary_size < 1:
        raise DataError("tokenizer: the vocabulary is empty")
    return tokenizer


def _code_points(text: str) -> NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), dtype="<u4")
