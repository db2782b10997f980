"""Tokenizers as the files that transformers reads, and back."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from arb_ternary.errors import ConfigError, DataError
from arb_ternary_interchange.huggingface.json_file import read_text
from arb_ternary_text.data.byte_level import BYTE_CHARACTERS, byte_level_bpe

_DEFINITION: Final = "tokenizer.json"
_SENTENCEPIECE: Final = "tokenizer.model"
_CONFIG: Final = "tokenizer_config.json"
#: Largest tokenizer file; those of vocabularies of 256,000 have 35 MB.
_MAX_BYTES: Final = 128 << 20

_WHY_NOT: Final = {
    "characters": "an alphabet of single characters cannot write other text, so no tokenizer of "
    "transformers is one",
    "ids": "the data is token ids whose tokenizer is not known here",
}


def byte_definition() -> dict[str, Any]:
    """A file of the package ``tokenizers`` whose ids are the bytes of the UTF-8 text.

    A byte-level BPE without merges: its 256 tokens are the characters by which GPT-2 writes the
    bytes.
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
    """
    if tokenizer.get("kind") == "padded":
        # more rows in the embedding are none of the tokenizer's business
        tokenizer = tokenizer["tokenizer"]
    kind = tokenizer.get("kind")
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
        "add_eos_token": False,
    }
    if kind == "bytes":
        (folder / _DEFINITION).write_text(json.dumps(byte_definition()), encoding="utf-8")
    elif kind == "file":
        (folder / _DEFINITION).write_text(str(tokenizer["definition"]), encoding="utf-8")
    elif kind == "sentencepiece":
        (folder / _SENTENCEPIECE).write_bytes(base64.b64decode(tokenizer["model"]))
        settings |= {"tokenizer_class": "LlamaTokenizer", "legacy": True}
    else:
        why = _WHY_NOT.get(str(kind), "it is of a kind that is not known here")
        raise ConfigError(
            f"tokenizer: {kind!r} has no form in transformers: {why}",
            "Train with `tokenizer: bytes` or a tokenizer's .json file, or export without one: `-o "
            "tokenizer=false`.",
        )
    (folder / _CONFIG).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def read_tokenizer(folder: Path) -> Mapping[str, Any] | None:
    """The tokenizer of a model folder, as ``Tokenizer.to_json`` writes it; None when there is none
    that is known.

    Raises:
        DataError: its file is too large, or not UTF-8.
    """
    if (path := folder / _DEFINITION).is_file():
        definition = read_text(path, _MAX_BYTES)
        return (
            {"kind": "bytes"}
            if _is_bytes(definition)
            else {"kind": "file", "definition": definition}
        )
    if (path := folder / _SENTENCEPIECE).is_file():
        try:
            model = path.read_bytes() if path.stat().st_size <= _MAX_BYTES else None
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}") from error
        if model is None:
            raise DataError(f"{path}: is larger than {_MAX_BYTES} bytes, which no tokenizer is")
        return {"kind": "sentencepiece", "model": base64.b64encode(model).decode("ascii")}
    return None


def _is_bytes(definition: str) -> bool:
    if len(definition) > 1 << 15:
        return False
    try:
        return bool(json.loads(definition) == byte_definition())
    except (ValueError, RecursionError):
        return False  # what is wrong with the file is said by who reads it
