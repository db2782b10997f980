"""Names of tensors: the decoder's module paths, and transformers'."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import MappingProxyType
from typing import Final

_WHOLE: Final = MappingProxyType(
    {
        "embedding": "model.embed_tokens.weight",
        "final_norm": "model.norm.weight",
        "head": "lm_head.weight",
    }
)
_IN_BLOCK: Final = MappingProxyType(
    {
        "attention.norm": "input_layernorm.weight",
        "attention.query": "self_attn.q_proj.weight",
        "attention.key": "self_attn.k_proj.weight",
        "attention.value": "self_attn.v_proj.weight",
        "attention.biases.query": "self_attn.q_proj.bias",
        "attention.biases.key": "self_attn.k_proj.bias",
        "attention.biases.value": "self_attn.v_proj.bias",
        "attention.query_norm": "self_attn.q_norm.weight",
        "attention.key_norm": "self_attn.k_norm.weight",
        "attention.output_norm": "self_attn.attn_sub_norm.weight",
        "attention.output": "self_attn.o_proj.weight",
        "feed_forward.norm": "post_attention_layernorm.weight",
        "feed_forward.gate": "mlp.gate_proj.weight",
        "feed_forward.up": "mlp.up_proj.weight",
        "feed_forward.hidden_norm": "mlp.ffn_sub_norm.weight",
        "feed_forward.down": "mlp.down_proj.weight",
    }
)

#: Paths in a block of the matrices of its linears.
LINEARS: Final = tuple(
    f"{layer}.{part}"
    for layer, parts in (
        ("attention", ("query", "key", "value", "output")),
        ("feed_forward", ("gate", "up", "down")),
    )
    for part in parts
)
ATTENTION_BIASES: Final = tuple(f"attention.biases.{part}" for part in ("query", "key", "value"))

_BLOCK: Final = re.compile(r"blocks\.(\d+)\.(.+)")


def hf_name(name: str) -> str:
    """The name of a tensor in transformers; KeyError for a path that no supported architecture
    has.
    """
    if match := _BLOCK.fullmatch(name):
        return f"model.layers.{match[1]}.{_IN_BLOCK[match[2]]}"
    return _WHOLE[name]


def is_linear(name: str) -> bool:
    """Whether a path is that of a linear's matrix, the head included."""
    match = _BLOCK.fullmatch(name)
    return name == "head" if match is None else match[2] in LINEARS


def neutral_names(architecture: str, layers: int, *, tied: bool, biases: bool) -> Iterator[str]:
    """Paths of all tensors of a decoder, in the order in which it computes."""
    left_out = set()
    if architecture != "bitnet":
        left_out |= {"attention.output_norm", "feed_forward.hidden_norm"}
    if architecture != "qwen3":
        left_out |= {"attention.query_norm", "attention.key_norm"}
    if architecture == "arcee":
        left_out.add("feed_forward.gate")
    if not biases:
        left_out |= set(ATTENTION_BIASES)
    yield "embedding"
    for layer in range(layers):
        yield from (f"blocks.{layer}.{part}" for part in _IN_BLOCK if part not in left_out)
    yield "final_norm"
    if not tied:
        yield "head"
