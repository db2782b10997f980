"""Ways in which byte-level tokenizers split a text before they merge: llama.cpp's names, and the
same in a tokenizer.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from attrs import frozen

_LLAMA_3: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN_2: Final = _LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}")


def _byte_level(*, use_regex: bool) -> dict[str, Any]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


def _split(pattern: str) -> dict[str, Any]:
    split = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    return {"type": "Sequence", "pretokenizers": [split, _byte_level(use_regex=False)]}


_DIGITS: Final = {
    "type": "Sequence",
    "pretokenizers": [
        {"type": "Digits", "individual_digits": True},
        _byte_level(use_regex=True),
    ],
}


@frozen
class PreTokenizer:
    """A way to split a text.

    Attributes:
        name: llama.cpp's name of it (``tokenizer.ggml.pre``).
        definition: the ``pre_tokenizer`` of a tokenizer.json.
        ignore_merges: whether a piece that is a token is taken whole, whatever the merges make of
            it.
    """

    name: str
    definition: Mapping[str, Any]
    ignore_merges: bool = False


#: The ways that both llama.cpp and a tokenizer.json can express.
PRE_TOKENIZERS: Final = (
    PreTokenizer("gpt-2", _byte_level(use_regex=True)),
    PreTokenizer("llama-bpe", _split(_LLAMA_3), ignore_merges=True),
    PreTokenizer("dbrx", _split(_LLAMA_3)),
    PreTokenizer("qwen2", _split(_QWEN_2)),
    PreTokenizer("smollm", _DIGITS),
)


def find_pre_tokenizer(definition: object, ignore_merges: bool) -> PreTokenizer | None:
    """Return the way that a tokenizer.json defines; None if llama.cpp has no name for it."""
    wanted = _normalised(definition)
    for known in PRE_TOKENIZERS:
        if _normalised(known.definition) == wanted and known.ignore_merges == ignore_merges:
            return known
    return None


def _normalised(part: object) -> object:
    """Return ``part`` without what does not affect tokens, and with the defaults of what it leaves
    out.
    """
    if not isinstance(part, Mapping):
        return part
    if part.get("type") == "Sequence":
        return [_normalised(inner) for inner in part.get("pretokenizers", [])]
    left = {key: value for key, value in part.items() if key != "trim_offsets"}
    return {"use_regex": True, **left} if part.get("type") == "ByteLevel" else left
