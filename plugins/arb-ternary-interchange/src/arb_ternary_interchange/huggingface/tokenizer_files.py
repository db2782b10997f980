"""Tokenizers as the files that transformers reads, and back."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from attrs import evolve, frozen

from arb_ternary.errors import ConfigError, DataError
from arb_ternary_interchange.gguf.pre_tokenizers import PRE_TOKENIZERS
from arb_ternary_interchange.huggingface.added_tokens import (
    NO_ID,
    SAVE_AGAIN,
    TokenizerSettings,
    read_settings,
    with_added_tokens,
)
from arb_ternary_interchange.huggingface.json_file import read_bytes, read_object, read_text
from arb_ternary_interchange.huggingface.known import note_of
from arb_ternary_interchange.huggingface.prefix_space import (
    check_prefix_space,
    has_prefix_space,
    set_prefix_space,
)
from arb_ternary_interchange.huggingface.sentencepiece_definition import (
    special_roles,
    tokenizer_definition,
)
from arb_ternary_interchange.huggingface.special_tokens import (
    adding_definition,
    special_token_settings,
    with_special_tokens,
    write_special_tokens,
)
from arb_ternary_interchange.sentencepiece_model import read_model
from arb_ternary_text.data.byte_level import BYTE_CHARACTERS, byte_level_bpe
from arb_ternary_text.data.file_tokenizers import SentencePieceTokenizer
from arb_ternary_text.data.tokenizers import base_state, from_json

_DEFINITION: Final = "tokenizer.json"
_SENTENCEPIECE: Final = "tokenizer.model"
_CONFIG: Final = "tokenizer_config.json"
_VOCABULARY: Final = "vocab.json"
_MERGES: Final = "merges.txt"
#: Largest tokenizer file; those of vocabularies of 256,000 ids have 35 MB.
_MAX_BYTES: Final = 128 << 20

#: Kinds of tokenizers that have a form in transformers.
_WRITTEN: Final = ("bytes", "file", "sentencepiece")
_REASONS: Final = {
    "characters": "an alphabet of single characters cannot write other text, so no tokenizer of "
    "transformers is one",
    "ids": "the data is token ids whose tokenizer is not known here",
}


#: Classes of transformers that make a tokenizer of a vocabulary and merges: how they split a text
#: (:data:`.PRE_TOKENIZERS`), and how they normalise it.
_CLASSES: Final[Mapping[str, tuple[str, Mapping[str, str] | None]]] = {
    "GPT2Tokenizer": ("gpt-2", None),
    "Qwen2Tokenizer": ("qwen2", {"type": "NFC"}),
}
#: Classes that take a ``tokenizer.json`` as it is.
_AS_IN_FILE: Final = ("PreTrainedTokenizer", "TokenizersBackend")
#: The class of a model type whose folder does not say.
_CLASS_OF_MODEL: Final = {"qwen2": "Qwen2Tokenizer", "qwen3": "Qwen2Tokenizer"}
#: The special token of these classes in the roles that no file gives a token.
_DEFAULT_SPECIAL: Final = "<|endoftext|>"


@frozen
class FoundTokenizer:
    """The tokenizer of a model folder.

    Attributes:
        state: the tokenizer as ``Tokenizer.to_json`` writes it; None if there is none.
        notes: what its files hold and the tokenizer does not, one sentence each.
    """

    state: Mapping[str, Any] | None
    notes: tuple[str, ...] = ()


def byte_definition() -> dict[str, Any]:
    """Return a file of the package ``tokenizers`` whose ids are the bytes of the UTF-8 text.

    It is a byte-level BPE without merges: its 256 tokens are the characters by which GPT-2 writes
    the bytes.
    """
    level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    vocabulary = {character: byte for byte, character in enumerate(BYTE_CHARACTERS)}
    return byte_level_bpe(vocabulary, (), pre_tokenizer=level, decoder=level)


def write_tokenizer(folder: Path, tokenizer: Mapping[str, Any], max_length: int) -> None:
    """Write the files of a tokenizer, given as ``Tokenizer.to_json`` writes it.

    Raises:
        ConfigError: transformers has no such tokenizer.
        DataError: a sentencepiece model is damaged.
        EnvironmentProblem: the comparison with a sentencepiece model needs a package that is not
            installed.
    """
    # The embedding may have more rows than ids.
    base = base_state(tokenizer) or {}
    kind = base.get("kind")
    if kind not in _WRITTEN:
        why = _REASONS.get(str(kind), "it is of a kind that is not known here")
        raise ConfigError(
            f"tokenizer: {kind!r} has no form in transformers: {why}",
            "Train with `tokenizer: bytes` or a tokenizer's .json file, or export without one: `-o "
            "tokenizer=false`.",
        )
    whole = from_json(tokenizer)
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        **special_token_settings(whole),
    }
    if kind == "bytes":
        definition = json.dumps(byte_definition())
    elif kind == "file":
        definition = str(base["definition"])
    else:
        content = base64.b64decode(base["model"])
        model = read_model(content)
        definition = json.dumps(tokenizer_definition(model, content))
        settings = special_roles(model) | settings
    (folder / _DEFINITION).write_text(adding_definition(whole, definition), encoding="utf-8")
    (folder / _CONFIG).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    write_special_tokens(folder, whole)


def read_tokenizer(
    folder: Path, model_type: str, vocabulary_size: int | None = None
) -> FoundTokenizer:
    """Read the tokenizer of a model folder: ``tokenizer.json``, ``tokenizer.model``, or
    ``vocab.json`` with ``merges.txt``, and the tokens that other files add to it.

    Args:
        folder: the folder.
        model_type: the model type of its ``config.json``.
        vocabulary_size: number of ids of the model; None if it is not known.

    Raises:
        DataError: a file cannot be read, is too large, or is not UTF-8, or the files cannot be put
            together as transformers does.
    """
    settings = read_settings(folder)
    class_name = settings.class_name or _CLASS_OF_MODEL.get(model_type, "")
    settings = evolve(settings, class_name=class_name.removesuffix("Fast"))
    if settings.class_name in _CLASSES:
        defaults = dict.fromkeys(("eos_token", "unk_token"), _DEFAULT_SPECIAL)
        settings = evolve(settings, special={**defaults, **settings.special})
    found = _read(folder, settings, model_type, vocabulary_size)
    if found.state is None:
        return found
    config = folder / _CONFIG
    state, notes = with_special_tokens(
        folder,
        found.state,
        special=settings.special,
        settings=read_object(config, _MAX_BYTES) if config.is_file() else {},
        class_name=settings.class_name or "",
    )
    return FoundTokenizer(state, (*found.notes, *notes))


def _read(
    folder: Path, settings: TokenizerSettings, model_type: str, vocabulary_size: int | None
) -> FoundTokenizer:
    path = folder / _DEFINITION
    if path.is_file():
        return _from_definition(path, settings, vocabulary_size)
    others = [name for name in (_VOCABULARY, _MERGES) if (folder / name).is_file()]
    path = folder / _SENTENCEPIECE
    if path.is_file():
        found = _from_sentencepiece(path, settings)
    elif _VOCABULARY in others:
        return _from_merges(folder / _VOCABULARY, settings, model_type, vocabulary_size)
    else:
        found = FoundTokenizer(None, settings.notes)
    return evolve(found, notes=(*found.notes, *note_of("Files that are not used", others)))


def _from_definition(
    path: Path, settings: TokenizerSettings, vocabulary_size: int | None
) -> FoundTokenizer:
    text = read_text(path, _MAX_BYTES)
    rebuilt = settings.class_name in _CLASSES
    plain = settings.prefix_space is None and not rebuilt
    if plain and not settings.added and not any(settings.special.values()):
        state = {"kind": "bytes"} if _is_bytes(text) else {"kind": "file", "definition": text}
        return FoundTokenizer(state, settings.notes)
    definition = read_object(path, _MAX_BYTES)
    try:
        has_changed, notes = with_added_tokens(definition, settings, path, vocabulary_size)
        if rebuilt:
            has_changed |= set_prefix_space(definition, bool(settings.prefix_space))
        if settings.class_name not in _AS_IN_FILE:
            check_prefix_space(has_prefix_space(definition), settings, path)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{path}: is not a file of the library tokenizers: {error!r}") from error
    if has_changed:
        text = json.dumps(definition, ensure_ascii=False)
    return FoundTokenizer({"kind": "file", "definition": text}, (*settings.notes, *notes))


def _from_sentencepiece(path: Path, settings: TokenizerSettings) -> FoundTokenizer:
    content = read_bytes(path, _MAX_BYTES)
    tokenizer = SentencePieceTokenizer.from_bytes(content)
    special = {text: None for text in settings.special.values() if text is not None}
    if not settings.added and not special and settings.prefix_space is None:
        return FoundTokenizer(tokenizer.to_json(), settings.notes)
    model = read_model(content)
    check_prefix_space(model.prefix, settings, path)
    further = [token for token in settings.added if token["id"] >= len(model.pieces)]
    if further:
        text = further[0]["content"]
        raise DataError(
            f"{path}: has {len(model.pieces)} pieces, and other files add {len(further)} "
            f"tokens, of which {text[:120]!r} is the first",
            f"Tokens cannot be added to a sentencepiece model here. {SAVE_AGAIN}",
        )
    pieces = {piece.text for piece in model.pieces}
    without_id = [repr(text) for text in special if text not in pieces]
    return FoundTokenizer(tokenizer.to_json(), (*settings.notes, *note_of(NO_ID, without_id)))


def _from_merges(
    path: Path, settings: TokenizerSettings, model_type: str, vocabulary_size: int | None
) -> FoundTokenizer:
    """Make a byte-level tokenizer of a vocabulary and the merges beside it."""
    name = settings.class_name or ""
    made = _CLASSES.get(name)
    if made is None:
        raise DataError(
            f"{path}: how the tokenizer {name or 'of a ' + model_type} splits a text is not known "
            f"here; {' and '.join(_CLASSES)} are",
            SAVE_AGAIN,
        )
    splitting, normalizer = made
    vocabulary = read_object(path, _MAX_BYTES)
    if sorted(map(str, vocabulary.values())) != sorted(map(str, range(len(vocabulary)))):
        raise DataError(f"{path}: its ids are not the numbers from 0 to {len(vocabulary) - 1}")
    merges = _read_merges(path.with_name(_MERGES), vocabulary)
    pre_tokenizer = next(known.definition for known in PRE_TOKENIZERS if known.name == splitting)
    decoder = {
        "type": "ByteLevel",
        "add_prefix_space": True,
        "trim_offsets": True,
        "use_regex": True,
    }
    definition = byte_level_bpe(vocabulary, merges, pre_tokenizer=pre_tokenizer, decoder=decoder)
    definition["normalizer"] = normalizer
    _, notes = with_added_tokens(definition, settings, path, vocabulary_size)
    set_prefix_space(definition, bool(settings.prefix_space))
    text = json.dumps(definition, ensure_ascii=False)
    return FoundTokenizer({"kind": "file", "definition": text}, (*settings.notes, *notes))


def _read_merges(path: Path, vocabulary: Mapping[str, Any]) -> list[list[str]]:
    """Read a file of merges: two tokens per line, in the order in which they are merged."""
    merges = []
    for number, line in enumerate(read_text(path, _MAX_BYTES).split("\n"), start=1):
        pair = line.split()
        if not pair or line.startswith("#version"):
            continue
        if len(pair) != 2 or not {*pair, "".join(pair)} <= vocabulary.keys():
            raise DataError(
                f"{path}: line {number}: is not two tokens of {_VOCABULARY} that make a third"
            )
        merges.append(pair)
    return merges


def _is_bytes(definition: str) -> bool:
    if len(definition) > 1 << 15:
        return False
    try:
        return bool(json.loads(definition) == byte_definition())
    except (ValueError, RecursionError):
        return False  # whoever builds the tokenizer says what is wrong with the file
