"""The characters that GPT-2's tokenizers write bytes as (Radford et al., 2019).

Printable bytes stand for themselves, in Latin-1. The others are the characters from U+0100 on, in
their order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

_PRINTABLE: Final = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
_OTHERS: Final = [byte for byte in range(256) if byte not in _PRINTABLE]

#: The character of each byte.
BYTE_CHARACTERS: Final = tuple(
    chr(byte) if byte in _PRINTABLE else chr(0x100 + _OTHERS.index(byte)) for byte in range(256)
)


def byte_level_bpe(
    vocabulary: Mapping[str, int],
    merges: Sequence[Sequence[str]],
    *,
    pre_tokenizer: Mapping[str, Any],
    decoder: Mapping[str, Any],
    added: Sequence[Mapping[str, Any]] = (),
    ignore_merges: bool = False,
) -> dict[str, Any]:
    """Return the content of a file of the package ``tokenizers`` for a BPE on bytes.

    Args:
        vocabulary: id of each token, written in :data:`BYTE_CHARACTERS`.
        merges: pairs of tokens in the order in which they are merged.
        pre_tokenizer: how a text is cut into pieces.
        decoder: how pieces are joined.
        added: tokens that are found before anything else.
        ignore_merges: whether a piece that is a token is taken whole.
    """
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": list(added),
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": decoder,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": ignore_merges,
            "vocab": dict(vocabulary),
            "merges": list(merges),
        },
    }
