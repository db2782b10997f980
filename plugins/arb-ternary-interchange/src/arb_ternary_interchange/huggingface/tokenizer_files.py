"""Tokenizers as the files that transformers reads, and back."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from arb_ternary.errors import ConfigError
from arb_ternary_interchange.huggingface.json_file import read_bytes, read_text
from arb_ternary_text.data.byte_level import BYTE_CHARACTERS, byte_level_bpe

_DEFINITION: Final = "tokenizer.json"
_SENTENCEPIECE: Final = "tokenizer.model"
_CONFIG: Final = "tokenizer_config.json"
#: Largest tokenizer file; those of vocabularies of 256,000 ids have 35 MB.
_MAX_BYTES: Final = 128 << 20

_REASONS: Final = {
    "characters": "an alphabet of single characters cannot write other text, so no tokenizer of "
    "transformers is one",
    "ids": "the data is token ids whose tokenizer is not known here",
}


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
    """
    if tokenizer.get("kind") == "padded":
        tokenizer = tokenizer["tokenizer"]  # the embedding may have more rows than ids
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
        why = _REASONS.get(str(kind), "it is of a kind that is not known here")
        raise ConfigError(
            f"tokenizer: {kind!r} has no form in transformers: {why}",
            "Train with `tokenizer: bytes` or a tokenizer's .json file, or export without one: `-o "
            "tokenizer=false`.",
        )
    (folder / _CONFIG).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def read_tokenizer(folder: Path) -> Mapping[str, Any] | None:
    """Return the tokenizer of a model folder, as ``Tokenizer.to_json`` writes it; None if there is
    none that is known.

    Raises:
        DataError: its file cannot be read, is too large, or is not UTF-8.
    """
    path = folder / _DEFINITION
    if path.is_file():
        definition = read_text(path, _MAX_BYTES)
        if _is_bytes(definition):
            return {"kind": "bytes"}
        return {"kind": "file", "definition": definition}
    path = folder / _SENTENCEPIECE
    if path.is_file():
        model = read_bytes(path, _MAX_BYTES)
        return {"kind": "sentencepiece", "model": base64.b64encode(model).decode("ascii")}
    return None


def _is_bytes(definition: str) -> bool:
    if len(definition) > 1 << 15:
        return False
    try:
        return bool(json.loads(definition) == byte_definition())
    except (ValueError, RecursionError):
        return False  # whoever builds the tokenizer says what is wrong with the file
