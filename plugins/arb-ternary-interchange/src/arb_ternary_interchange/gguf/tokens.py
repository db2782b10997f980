"""A tokenizer as llama.cpp describes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Final

from attrs import field, frozen

from arb_ternary.errors import DataError
from arb_ternary_interchange.gguf.values import Array, Kind, Scalar, Value

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
    """Kind of a token, by its number in llama.cpp and sentencepiece."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@frozen(kw_only=True)
class Vocabulary:
    """A tokenizer of llama.cpp.

    Attributes:
        model: ``gpt2`` (merges of bytes), ``llama`` (sentencepiece's merges by score) or ``t5``
            (unigrams).
        tokens: text of each id; for ``gpt2`` in the characters of ``BYTE_CHARACTERS``.
        kinds: kind of each token.
        end: id of the end of a text.
        pre: for ``gpt2``, how a text is split before it merges.
        merges: for ``gpt2``, pairs of tokens with a space between them, in order.
        scores: for ``llama`` and ``t5``, the score of each token.
        unknown: id of what there is no token for.
        characters: for ``t5``, the compiled table by which characters are replaced first.
        flags: further booleans under ``tokenizer.ggml.``.
    """

    model: str
    tokens: Sequence[str]
    kinds: Sequence[TokenKind]
    end: int
    pre: str | None = None
    merges: Sequence[str] | None = None
    scores: Sequence[float] | None = None
    unknown: int | None = None
    characters: bytes | None = None
    flags: Mapping[str, bool] = field(factory=dict)

    def keys(self, vocabulary_size: int) -> dict[str, Value]:
        """Return the metadata, with unused tokens up to ``vocabulary_size`` ids."""
        padding = range(len(self.tokens), vocabulary_size)
        tokens = list(self.tokens) + [f"[PAD{i}]" for i in padding]
        kinds = list(self.kinds) + [TokenKind.UNUSED] * len(padding)
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
            values["scores"] = Array(Kind.FLOAT32, list(self.scores) + [0.0] * len(padding))
        if self.unknown is not None:
            values["unknown_token_id"] = Scalar(Kind.UINT32, self.unknown)
        if self.characters:
            values["precompiled_charsmap"] = Array(Kind.UINT8, self.characters)
        return {f"tokenizer.ggml.{name}": value for name, value in values.items()}


def end_of_text(tokens: Sequence[str], zero: str) -> int:
    """Return the id of the end of a text: a token of a usual name, else the byte 0 (``zero``),
    which no text has.

    llama.cpp takes token 11 if the file does not say.
    """
    for name in (*_ENDS, zero):
        if name in tokens:
            return tokens.index(name)
    raise refused("it has no token for the end of a text", f"one of {', '.join(_ENDS)}")


def refused(what: str, wanted: str) -> DataError:
    """Return the error for a tokenizer that llama.cpp does not have."""
    return DataError(
        f"tokenizer: llama.cpp has none that gives the same ids: {what}",
        f"What it takes here: {wanted}. Export to safetensors keeps any tokenizer.",
    )
