"""Tokenizers as the files that transformers reads, and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from attrs import evolve, frozen

from arb_ternary.errors import ConfigError, DataError
from arb_ternary_interchange.huggingface.json_file import read_object, read_text
from arb_ternary_interchange.huggingface.known import note_of
from arb_ternary_interchange.huggingface.sentencepiece_definition import tokenizer_definition
from arb_ternary_interchange.huggingface.special_tokens import (
    adding_definition,
    special_token_settings,
    with_special_tokens,
    write_template,
)
from arb_ternary_interchange.huggingface.tokenizer_conversion import SAVE_AGAIN, convert_tokenizer
from arb_ternary_interchange.huggingface.tokenizer_settings import (
    TokenizerSettings,
    read_settings,
)
from arb_ternary_text.data.byte_level import BYTE_CHARACTERS, byte_level_bpe
from arb_ternary_text.data.file_tokenizers import FileTokenizer, SentencePieceTokenizer
from arb_ternary_text.data.tokenizers import ByteTokenizer, Tokenizer, base_state, from_json

_DEFINITION: Final = "tokenizer.json"
_CONFIG: Final = "tokenizer_config.json"
#: Files of which transformers makes a tokenizer.
_CONVERTED: Final = ("tokenizer.model", "vocab.json")
_MERGES: Final = "merges.txt"
#: How tokens write a space.
_SPACES: Final = ("\u0120", "\u2581")
#: The start of a note on special tokens.
_NO_ID: Final = "Special tokens that have no id of the model, and are left out"
#: Largest tokenizer file; those of vocabularies of 256,000 ids have 35 MB.
_MAX_BYTES: Final = 128 << 20

#: Kinds of tokenizers that have a form in transformers.
_WRITTEN: Final = ("bytes", "file", "sentencepiece")
_REASONS: Final = {
    "characters": "an alphabet of single characters cannot write other text, so no tokenizer of "
    "transformers is one",
    "ids": "the data is token ids whose tokenizer is not known here",
}


#: Classes that make a tokenizer of a ``tokenizer.json`` anew: its space before a text is that of
#: the settings, and :data:`_DEFAULT_SPECIAL` has the roles that no file gives a token.
_REBUILT: Final = ("GPT2Tokenizer", "Qwen2Tokenizer")
_DEFAULT_SPECIAL: Final = "<|endoftext|>"
#: Classes that take a ``tokenizer.json`` as it is.
_AS_IN_FILE: Final = ("PreTrainedTokenizer", "TokenizersBackend")
#: The class of a model type whose folder does not say.
_CLASS_OF_MODEL: Final = {"qwen2": "Qwen2Tokenizer", "qwen3": "Qwen2Tokenizer"}


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
        EnvironmentProblem: a sentencepiece model needs a package that is not installed.
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
        model = SentencePieceTokenizer(str(base["model"]))
        definition = tokenizer_definition(model)
        settings = {f"{role}_token": text for role, text in model.roles().items()} | settings
    (folder / _DEFINITION).write_text(adding_definition(whole, definition), encoding="utf-8")
    (folder / _CONFIG).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    write_template(folder, whole)


def read_tokenizer(
    folder: Path, model_type: str, vocabulary_size: int | None = None
) -> FoundTokenizer:
    """Read the tokenizer of a model folder: ``tokenizer.json``, or what transformers makes of
    other files.

    Args:
        folder: the folder.
        model_type: the model type of its ``config.json``.
        vocabulary_size: number of ids of the model; special tokens without an id get none from
            there on. None if it is not known.

    Raises:
        DataError: a file cannot be read, is too large, or is not UTF-8, or transformers makes no
            tokenizer of the files.
        EnvironmentProblem: it takes transformers to read them, which is not installed.
    """
    settings = read_settings(folder)
    class_name = settings.class_name or _CLASS_OF_MODEL.get(model_type, "")
    settings = evolve(settings, class_name=class_name.removesuffix("Fast"))
    if settings.class_name in _REBUILT:
        defaults = dict.fromkeys(("eos_token", "unk_token"), _DEFAULT_SPECIAL)
        settings = evolve(settings, special={**defaults, **settings.special})
    path = folder / _DEFINITION
    special = settings.special
    tokenizer = None
    notes: tuple[str, ...] = ()
    if path.is_file():
        tokenizer, notes = _read_definition(path, settings, vocabulary_size)
    elif not any((folder / name).is_file() for name in _CONVERTED):
        unused = [name for name in (_MERGES,) if (folder / name).is_file()]
        return FoundTokenizer(None, settings.notes + note_of("Files that are not used", unused))
    if tokenizer is None:
        tokenizer, special = _convert(folder, settings)
    config = folder / _CONFIG
    state, more = with_special_tokens(
        folder, tokenizer, special, read_object(config, _MAX_BYTES) if config.is_file() else {}
    )
    return FoundTokenizer(state, (*settings.notes, *notes, *more))


def _read_definition(
    path: Path, settings: TokenizerSettings, vocabulary_size: int | None
) -> tuple[Tokenizer | None, tuple[str, ...]]:
    """Return the tokenizer of a ``tokenizer.json``, or None if the files beside it say anything
    else, and a note on special tokens that have no id.
    """
    text = read_text(path, _MAX_BYTES)
    tokenizer = FileTokenizer(text)
    try:
        size = tokenizer.vocabulary_size
        begun = tokenizer.encode("a")[:1]
        puts_space = any(tokenizer.token_text(token)[:1] in _SPACES for token in begun)
    except DataError as error:
        raise DataError(f"{path}: {error.what}", error.hint) from error
    content = json.loads(text)
    listed = {token["content"] for token in content.get("added_tokens") or ()}
    without_id = []
    for token in settings.special.values():
        if token is None or token in listed:
            continue
        has_row = vocabulary_size is None or size < vocabulary_size
        if has_row or tokenizer.token_id(token) is not None:
            return None, ()
        without_id.append(repr(token))
    for token, number in settings.added.items():
        if token not in listed or tokenizer.token_id(token) != number:
            return None, ()
    wanted = settings.prefix_space
    if settings.class_name in _REBUILT:
        wanted = bool(wanted)
    if settings.class_name not in _AS_IN_FILE and wanted not in (None, puts_space):
        return None, ()
    notes = note_of(_NO_ID, list(dict.fromkeys(without_id)))
    return ByteTokenizer() if content == byte_definition() else tokenizer, notes


def _convert(
    folder: Path, settings: TokenizerSettings
) -> tuple[Tokenizer, Mapping[str, str | None]]:
    """Return the tokenizer that transformers makes of a folder, and its special tokens by role."""
    paths = [folder / name for name in (_DEFINITION, *_CONVERTED, _MERGES)]
    paths = [path for path in paths if path.is_file()]
    for path in paths:
        if path.stat().st_size > _MAX_BYTES:
            raise DataError(f"{path}: is larger than {_MAX_BYTES} bytes, which no such file is")
    converted = convert_tokenizer(folder, f"{paths[0]}: is converted with the files beside it")
    tokenizer = FileTokenizer(converted.definition)
    for token, number in settings.added.items():
        got = tokenizer.token_id(token)
        if got != number:
            raise DataError(
                f"{folder}: the added token {token[:120]!r} has the id {number} in the files "
                f"beside the tokenizer, and would have {got}",
                SAVE_AGAIN,
            )
    return tokenizer, converted.special
