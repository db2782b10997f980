"""A run's tokenizer as the keys ``tokenizer.ggml.*`` of a GGUF file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, Final

from attrs import field, frozen

from arb_ternary.errors import DataError
from arb_ternary_gguf.byte_characters import BYTE_CHARACTERS
from arb_ternary_gguf.pre_tokenizers import CUTS, cut_of
from arb_ternary_gguf.values import Array, Kind, Scalar, Value

__all__ = ["TokenKind", "Vocabulary", "vocabulary_keys"]

#: Names by which tokenizers call the end of a text, the most usual first.
_ENDS: Final = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|eot_id|>",
    "<|im_end|>",
    "[EOS]",
    "<|end|>",
)


class TokenKind(IntEnum):
    """Kind of a token, by llama.cpp's number."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@frozen
class Vocabulary:
    """What llama.cpp has to know of a tokenizer.

    Attributes:
        model: ``gpt2`` (merges of bytes), ``llama`` (sentencepiece's merges by score) or ``t5`` (unigrams).
        tokens: text of each id; of ``gpt2`` in the characters of :data:`BYTE_CHARACTERS`.
        kinds: of each token.
        end: id of the end of a text.
        pre: how ``gpt2`` cuts a text first.
        merges: of ``gpt2``, pairs with a space between them, the first first.
        scores: of ``llama`` and ``t5``, of each token.
        flags: further booleans under ``tokenizer.ggml.``.
    """

    model: str
    tokens: Sequence[str]
    kinds: Sequence[TokenKind]
    end: int
    pre: str | None = None
    merges: Sequence[str] | None = None
    scores: Sequence[float] | None = None
    flags: Mapping[str, bool] = field(factory=dict)

    def keys(self, vocabulary_size: int) -> dict[str, Value]:
        """The metadata, with unused tokens up to ``vocabulary_size`` ids."""
        missing = range(len(self.tokens), vocabulary_size)
        tokens = [*self.tokens, *(f"[PAD{i}]" for i in missing)]
        kinds = [*self.kinds, *(TokenKind.UNUSED for _ in missing)]
        values: dict[str, Value] = {
            "model": Scalar(Kind.STRING, self.model),
            "tokens": Array(Kind.STRING, tokens),
            "token_type": Array(Kind.INT32, kinds),
            "eos_token_id": Scalar(Kind.UINT32, self.end),
            "add_bos_token": Scalar(Kind.BOOL, False),
            "add_eos_token": Scalar(Kind.BOOL, False),
            **{name: Scalar(Kind.BOOL, value) for name, value in self.flags.items()},
        }
        if self.pre is not None:
            values["pre"] = Scalar(Kind.STRING, self.pre)
        if self.merges is not None:
            values["merges"] = Array(Kind.STRING, self.merges)
        if self.scores is not None:
            values["scores"] = Array(Kind.FLOAT32, [*self.scores, *(0.0 for _ in missing)])
        return {f"tokenizer.ggml.{name}": value for name, value in values.items()}


def vocabulary_keys(tokenizer: Mapping[str, Any] | None, vocabulary_size: int) -> dict[str, Value]:
    """The metadata of a tokenizer.

    Args:
        tokenizer: ``to_json`` of a tokenizer; None where the run has none.
        vocabulary_size: ids of the model, of which there may be more than of the tokenizer.

    Raises:
        DataError: there is none, or llama.cpp has none that gives the same ids.
    """
    while tokenizer is not None and tokenizer.get("kind") == "padded":
        tokenizer = tokenizer["tokenizer"]
    kind = None if tokenizer is None else tokenizer.get("kind")
    if tokenizer is None or kind not in _FORMS:
        raise DataError(*_REASONS.get(kind, (f"tokenizer: a GGUF file cannot hold the kind {kind!r}", "")))
    vocabulary = _FORMS[kind](tokenizer)
    if len(vocabulary.tokens) > vocabulary_size:
        raise DataError(
            f"tokenizer: it has {len(vocabulary.tokens)} ids, and the model {vocabulary_size}",
            "The run's tokenizer and its model do not belong together.",
        )
    return vocabulary.keys(vocabulary_size)


def _bytes(_tokenizer: Mapping[str, Any]) -> Vocabulary:
    # Without merges every byte stays a token of its own, whatever a text is cut into.
    return Vocabulary("gpt2", BYTE_CHARACTERS, [TokenKind.NORMAL] * 256, end=0, pre="gpt-2", merges=())


def _file(tokenizer: Mapping[str, Any]) -> Vocabulary:
    definition = json.loads(tokenizer["definition"])
    model = definition["model"]
    if model.get("type") == "BPE" and not model.get("byte_fallback"):
        return _byte_level(definition)
    raise _refused(f"its model is {model.get('type')!r}", "byte-level BPE")


def _byte_level(definition: Mapping[str, Any]) -> Vocabulary:
    model = definition["model"]
    for option in ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk"):
        if model.get(option) and not (option == "unk_token" and model[option] in model["vocab"]):
            raise _refused(f"`{option}` is {model[option]!r}", "no such option")
    if definition.get("normalizer") not in (None, {"type": "NFC"}):
        raise _refused(f"it normalises text by {definition['normalizer'].get('type')!r}", "NFC or nothing")
    if (definition.get("decoder") or {}).get("type") != "ByteLevel":
        raise _refused("its decoder is not ByteLevel", "GPT-2's bytes")
    cut = cut_of(definition.get("pre_tokenizer"), bool(model.get("ignore_merges")))
    if cut is None:
        raise _refused("its `pre_tokenizer` is none that llama.cpp has a name for", ", ".join(cut.name for cut in CUTS))
    tokens, kinds = _tokens(definition)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    return Vocabulary("gpt2", tokens, kinds, end=_end(tokens, BYTE_CHARACTERS[0]), pre=cut.name, merges=merges)


def _tokens(definition: Mapping[str, Any]) -> tuple[list[str], list[TokenKind]]:
    """Texts and kinds by id, ids without a token included."""
    by_id = {number: (text, TokenKind.NORMAL) for text, number in definition["model"]["vocab"].items()}
    for added in definition.get("added_tokens") or ():
        if added["normalized"] and not added["special"] and added["content"] in definition["model"]["vocab"]:
            continue
        by_id[added["id"]] = (added["content"], TokenKind.CONTROL if added["special"] else TokenKind.USER_DEFINED)
    size = max(by_id, default=-1) + 1
    filled = [by_id.get(i, (f"[PAD{i}]", TokenKind.UNUSED)) for i in range(size)]
    return [text for text, _ in filled], [kind for _, kind in filled]


def _end(tokens: Sequence[str], zero: str) -> int:
    """The id of the end of a text: a token of a usual name, else the byte 0, which no text has.

    llama.cpp takes the token 11 where the file says nothing.
    """
    for name in (*_ENDS, zero):
        if name in tokens:
            return tokens.index(name)
    raise _refused("it has no token for the end of a text", f"one of {', '.join(_ENDS)}")


def _refused(what: str, wanted: str) -> DataError:
    return DataError(
        f"tokenizer: llama.cpp has none that gives the same ids: {what}",
        f"What it takes here: {wanted}. Export to safetensors keeps any tokenizer.",
    )


_FORMS: Final = {"bytes": _bytes, "file": _file}

_REASONS: Final = {
    "characters": (
        "tokenizer: llama.cpp knows no tokenizer of single characters, so that a GGUF file cannot hold `characters`",
        "Train with `tokenizer: bytes`, or with a tokenizer.json.",
    ),
    "ids": (
        "tokenizer: the run was trained on token ids, and does not know which text they are",
        "Name the tokenizer's .json file in the data section of the config.",
    ),
    None: (
        "tokenizer: the run has none, and a GGUF file needs one",
        "Export the run of a text, or use `--format safetensors`.",
    ),
}
