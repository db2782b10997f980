"""Names of tensors: the paths of the decoder's modules, and llama.cpp's."""

from __future__ import annotations

import re
from typing import Final

#: Factors of the planes of rotation; llama.cpp divides each plane's angle by its factor.
ROPE_FACTORS: Final = "rope_freqs.weight"

_WHOLE: Final = {
    "embedding": "token_embd.weight",
    "final_norm": "output_norm.weight",
    "head": "output.weight",
}

_IN_BLOCKS: Final = {
    "attention.norm": "attn_norm.weight",
    "attention.query": "attn_q.weight",
    "attention.key": "attn_k.weight",
    "attention.value": "attn_v.weight",
    "attention.biases.query": "attn_q.bias",
    "attention.biases.key": "attn_k.bias",
    "attention.biases.value": "attn_v.bias",
    "attention.query_norm": "attn_q_norm.weight",
    "attention.key_norm": "attn_k_norm.weight",
    "attention.output_norm": "attn_sub_norm.weight",
    "attention.output": "attn_output.weight",
    "feed_forward.norm": "ffn_norm.weight",
    "feed_forward.gate": "ffn_gate.weight",
    "feed_forward.up": "ffn_up.weight",
    "feed_forward.hidden_norm": "ffn_sub_norm.weight",
    "feed_forward.down": "ffn_down.weight",
}

_BACK: Final = {theirs: ours for ours, theirs in (_WHOLE | _IN_BLOCKS).items()}
_BLOCK: Final = re.compile(r"blocks\.(\d+)\.(.+)")
_THEIR_BLOCK: Final = re.compile(r"blk\.(0|[1-9]\d{0,5})\.(.+)", re.ASCII)


def tensor_name(path: str) -> str:
    """llama.cpp's name of the tensor at ``path``, a path of
    ``arb_ternary_interchange.decoder.published``.
    """
    block = _BLOCK.fullmatch(path)
    return f"blk.{block[1]}.{_IN_BLOCKS[block[2]]}" if block else _WHOLE[path]


def neutral_name(name: str) -> str | None:
    """The inverse of :func:`tensor_name`; None for a tensor that the decoder has no place for."""
    block = _THEIR_BLOCK.fullmatch(name)
    if block is None:
        return _BACK.get(name) if name in _WHOLE.values() else None
    path = _BACK.get(block[2]) if block[2] in _IN_BLOCKS.values() else None
    return f"blocks.{block[1]}.{path}" if path else None


def scale_name(name: str) -> str:
    """The name of the float factor of the matrix ``name``."""
    return name.removesuffix(".weight") + ".scale"
