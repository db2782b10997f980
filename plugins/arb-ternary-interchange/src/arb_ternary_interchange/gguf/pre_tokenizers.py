"""How a byte-level tokenizer cuts a text before it merges: llama.cpp's names, and a
tokenizer.json's words for them.
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


@frozen
class Cut:
    """One way to cut.

    Attributes:
        name: llama.cpp's (``tokenizer.ggml.pre``).
        pre_tokenizer: of a tokenizer.json.
        ignore_merges: whether a piece that is a token is one, whatever the merges make of it.
    """

    name: str
    pre_tokenizer: Mapping[str, Any]
    ignore_merges: bool = False


#: The ways that both llama.cpp and a tokenizer.json can say.
CUTS: Final = (
    Cut("gpt-2", _byte_level(use_regex=True)),
    Cut("llama-bpe", _split(_LLAMA_3), ignore_merges=True),
    Cut("dbrx", _split(_LLAMA_3)),
    Cut("qwen2", _split(_QWEN_2)),
    Cut(
        "smollm",
        {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                _byte_level(use_regex=True),
            ],
        },
    ),
)


def cut_of(pre_tokenizer: object, ignore_merges: bool) -> Cut | None:
    """The cut that a tokenizer.json says; None where llama.cpp has no name for it."""
    wanted = _plain(pre_tokenizer)
    return next(
        (
            cut
            for cut in CUTS
            if _plain(cut.pre_tokenizer) == wanted and cut.ignore_merges == ignore_merges
        ),
        None,
    )


def _plain(part: object) -> object:
    """``part`` without what has no influence on tokens, and with the defaults of what it leaves
    out.
    """
    if not isinstance(part, Mapping):
        return part
    if part.get("type") == "Sequence":
        return [_plain(inner) for inner in part.get("pretokenizers", [])]
    left = {key: value for key, value in part.items() if key != "trim_offsets"}
    return {"use_regex": True, **left} if part.get("type") == "ByteLevel" else left
