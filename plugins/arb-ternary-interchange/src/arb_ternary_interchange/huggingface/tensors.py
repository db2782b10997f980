"""The tensors that an export writes, by their names in transformers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
from attrs import evolve, frozen
from torch import Tensor

from arb_ternary.errors import ConfigError
from arb_ternary_interchange.decoder.tensors import TensorNames, is_linear
from arb_ternary_interchange.decoder.weights import TernaryWeight, exported_weights, weight_paths
from arb_ternary_interchange.huggingface.packing import TRITS_PER_BYTE, pack
from arb_ternary_text.models.decoder import Decoder

NAMES: Final = TensorNames(
    blocks="model.layers.",
    outside={
        "embedding": "model.embed_tokens.weight",
        "final_norm": "model.norm.weight",
        "head": "lm_head.weight",
    },
    inside={
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
    },
)
#: The module of the head.
HEAD: Final = "lm_head"

#: Rows that are made dense together.
_ROWS: Final = 1024


@frozen
class FileTensors:
    """The tensors of a model's files.

    Attributes:
        model: the model.
        layout: see ``HfExportConfig``.
        dtype: dtype of float tensors.
        float_modules: modules that stay float, by their names in transformers.
    """

    model: Decoder
    layout: str
    dtype: torch.dtype
    float_modules: list[str]

    def names(self) -> list[str]:
        """Return the names of all tensors, and perhaps of some more."""
        names = []
        for path in weight_paths(self.model):
            name = NAMES.name(path)
            names.append(name)
            if self.layout != "dense" and is_linear(path):
                names.append(f"{name}_scale")
            if path.endswith("biases.value"):
                names.append(_output_bias(name))
        return names

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and tensor in the order of computation; each is made when it is asked for."""
        for path, weight in exported_weights(self.model):
            name = NAMES.name(path)
            if isinstance(weight, Tensor):
                yield name, weight.to(self.dtype)
                if path.endswith("biases.value") and self._has_output_bias():
                    zeros = torch.zeros(self.model.config.width, dtype=self.dtype)
                    yield _output_bias(name), zeros
            elif not self._is_quantised(path):
                yield name, _dense(weight, self.dtype)
            elif self.layout == "packed":
                _check_packable(path, weight)
                magnitude = weight.scale * 2.0 ** _exponent(path, weight)
                yield name, pack(weight.trits)
                yield f"{name}_scale", torch.tensor([1 / magnitude])
            else:
                # transformers computes in the dtype of these in the file, whatever the rest of the
                # model is loaded as.
                yield name, _dense(evolve(weight, scale=1.0), self.dtype)
                yield f"{name}_scale", torch.tensor([weight.scale])

    def _is_quantised(self, path: str) -> bool:
        """Whether transformers makes a BitNet linear of the module at ``path``."""
        if self.layout == "dense" or not is_linear(path):
            return False
        return NAMES.name(path).removesuffix(".weight") not in self.float_modules

    def _has_output_bias(self) -> bool:
        """Whether the class in transformers has a bias of the output projection besides those of
        queries, keys and values: all have, except for Qwen2.
        """
        config = self.model.config
        plain = not config.has_query_key_norm and not config.has_sub_norms
        return not plain or config.feed_forward_activation == "relu2"


def _output_bias(value_bias: str) -> str:
    """Return the name of the bias of the output projection from that of the values."""
    return value_bias.replace("v_proj", "o_proj")


def _dense(weight: TernaryWeight, dtype: torch.dtype) -> Tensor:
    """Return the matrix in ``dtype``, made some rows at a time: on the way its numbers and
    exponents have 32 bits each.
    """
    dense = torch.empty(weight.trits.shape, dtype=dtype)
    for start in range(0, len(dense), _ROWS):
        some = slice(start, start + _ROWS)
        dense[some] = weight.rows(some).dense()
    return dense


def _check_packable(path: str, weight: TernaryWeight) -> None:
    """Raise ConfigError unless the trits can be packed."""
    if weight.row_scale is not None:
        raise ConfigError(
            f"layout: packed has one scale per matrix, and the rows of {path} have factors",
            "Use `--layout dense_w1a8`, or dense, or train with `model.row_scales: false`.",
        )
    rows = weight.trits.shape[0]
    if rows % TRITS_PER_BYTE:
        raise ConfigError(
            f"layout: packed takes rows by fours, and {path} has {rows}",
            "Use `--layout dense_w1a8`, or dense.",
        )


def _exponent(path: str, weight: TernaryWeight) -> int:
    """Return the exponent of a matrix; raises ConfigError if its groups have different ones."""
    low = int(weight.exponent.min())
    high = int(weight.exponent.max())
    if low != high:
        raise ConfigError(
            f"layout: packed has one scale per matrix, and the groups of {path} have exponents "
            f"from {low} to {high}",
            "Use `--layout dense_w1a8`, which has the same arithmetic, or train with "
            "`model.group_size: tensor`.",
        )
    return low
