"""The tensors that an export writes: the name, the values and the scale of each.

Values are those of :mod:`arb_ternary_interchange.decoder.weights`, except for two things:

* **Rows of queries and keys.** The decoder and Hugging Face rotate feature ``p`` of a head with
  feature ``p + P`` (half-split). So do the graphs of ``qwen3`` and ``bitnet`` in llama.cpp; those
  of ``llama`` and ``arcee`` rotate feature ``2 p`` with feature ``2 p + 1`` (interleaved).
* **Scales.** llama.cpp multiplies the output of most linears by a tensor ``.scale``. It refuses one
  of the head, and its ``arcee`` graph reads those of the feed-forward layer without using them.
  There the scale goes into the gain of the norm before: a head is linear, and of ``down(relu(up(g
  x))^2)`` the scales ``d`` of down and ``u`` of up are a factor ``u sqrt(d)`` of ``g``.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from attrs import evolve, frozen
from torch import Tensor

from arb_ternary_interchange.decoder.tensors import TensorNames
from arb_ternary_interchange.decoder.weights import TernaryWeight, exported_weight
from arb_ternary_text.models.decoder import Decoder

NAMES: Final = TensorNames(
    blocks="blk.",
    outside={
        "embedding": "token_embd.weight",
        "final_norm": "output_norm.weight",
        "head": "output.weight",
    },
    inside={
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
    },
)
#: The factors of the planes of rotation; llama.cpp divides the angle of each plane by its factor.
ROPE_FACTORS: Final = "rope_freqs.weight"
#: Architectures whose rows of queries and keys are interleaved in a file.
INTERLEAVED: Final = frozenset({"llama", "arcee"})


@frozen(eq=False)
class FileTensor:
    """A tensor of a file.

    Attributes:
        name: its name in llama.cpp.
        values: what is written: a ternary matrix whose scale is 1, or float32.
        scale: the number in the tensor ``.scale`` of its linear; 1 = there is no such tensor.
    """

    name: str
    values: TernaryWeight | Tensor
    scale: float = 1.0


class FileTensors:
    """The tensors of a model's file by the paths of its weights. Each is made when it is asked for,
    so that there is never a second copy of all weights in memory.
    """

    def __init__(self, model: Decoder, architecture: str) -> None:
        self._model = model
        self._architecture = architecture
        self._scales: dict[str, float] = {}

    def at(self, path: str) -> FileTensor:
        """Return the tensor for the weight at ``path``.

        Raises:
            ConfigError: the weight's module is of a kind that cannot be exported.
        """
        values = exported_weight(self._model, path)
        scale = 1.0
        if isinstance(values, TernaryWeight):
            if not self._is_in_gain(path):
                scale = values.scale
            values = evolve(values, scale=1.0)
        elif path.endswith("norm"):
            values = values * self._scale_in_gain(path)

        part = path.rpartition(".")[2]
        if self._architecture in INTERLEAVED and part in ("query", "key"):
            config = self._model.config
            heads = config.heads if part == "query" else config.key_heads
            rows = to_interleaved(heads * config.key_features, heads)
            values = values[rows] if isinstance(values, Tensor) else values.rows(rows)
        return FileTensor(NAMES.name(path), values, scale)

    def _is_in_gain(self, path: str) -> bool:
        """Whether the scale of the linear at ``path`` goes into the gain of the norm before."""
        if path == "head":
            return True
        in_feed_forward = path.endswith((".feed_forward.up", ".feed_forward.down"))
        return self._architecture == "arcee" and in_feed_forward

    def _scale_in_gain(self, path: str) -> float:
        """Return the factor of the norm at ``path`` that stands for scales of linears after it."""
        if path == "final_norm" and not self._model.config.tied:
            return self._scale("head")
        if self._architecture == "arcee" and path.endswith(".feed_forward.norm"):
            layer = path.removesuffix(".norm")
            return self._scale(f"{layer}.up") * math.sqrt(self._scale(f"{layer}.down"))
        return 1.0

    def _scale(self, path: str) -> float:
        if path not in self._scales:
            weight = exported_weight(self._model, path)
            self._scales[path] = weight.scale if isinstance(weight, TernaryWeight) else 1.0
        return self._scales[path]


def scale_name(name: str) -> str:
    """Return the name of the tensor with the scale of the matrix ``name``."""
    return name.removesuffix(".weight") + ".scale"


def to_interleaved(rows: int, heads: int) -> Tensor:
    """Return the decoder's row for each row of a file: ``file = ours[to_interleaved(N, heads)]``,
    int64 ``[N]``.
    """
    return torch.arange(rows).view(heads, 2, rows // heads // 2).transpose(1, 2).reshape(-1)


def from_interleaved(rows: int, heads: int) -> Tensor:
    """Return the inverse: ``ours = file[from_interleaved(N, heads)]``."""
    return torch.arange(rows).view(heads, rows // heads // 2, 2).transpose(1, 2).reshape(-1)
