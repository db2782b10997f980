"""The tensors of a decoder: their paths, their shapes, and their names in other formats.

A path is that of the module in the decoder: ``embedding``, ``final_norm``, ``head`` (absent if the
embedding is the head), ``blocks.{i}.attention.{norm,query,key,value,output}``,
``blocks.{i}.attention.{output_norm,query_norm,key_norm}``,
``blocks.{i}.attention.biases.{query,key,value}`` and
``blocks.{i}.feed_forward.{norm,gate,up,down,hidden_norm}``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from attrs import frozen

from arb_ternary_text.models.architectures import PRESETS
from arb_ternary_text.models.config import DecoderConfig

#: Paths within a block of the matrices of its linears.
LINEARS: Final = (
    "attention.query",
    "attention.key",
    "attention.value",
    "attention.output",
    "feed_forward.gate",
    "feed_forward.up",
    "feed_forward.down",
)
#: Paths of the matrices at the two ends of a decoder.
ENDS: Final = ("embedding", "head")

_BLOCK: Final = re.compile(r"blocks\.(\d+)\.(.+)")


def is_bias(path: str) -> bool:
    """Whether a path is that of a bias."""
    return ".biases." in path


def is_linear(path: str) -> bool:
    """Whether a path is that of the matrix of a linear; the head is one."""
    block = _BLOCK.fullmatch(path)
    return path == "head" if block is None else block[2] in LINEARS


@frozen(kw_only=True)
class DecoderShape:
    """The sizes and options of a decoder that decide which tensors it has and their shapes.

    Attributes:
        vocabulary_size: rows of embedding and head.
        layers: number of blocks.
        width: features between blocks.
        hidden: features inside the feed-forward layer.
        heads: heads of queries.
        key_heads: heads of keys and values.
        head_dim: features of a head.
        gated: whether the feed-forward layer has a gate.
        sub_norms: whether the inputs of ``output`` and ``down`` are normalised.
        query_key_norm: whether queries and keys are normalised.
        tied: whether the embedding is the head.
    """

    vocabulary_size: int
    layers: int
    width: int
    hidden: int
    heads: int
    key_heads: int
    head_dim: int
    gated: bool
    sub_norms: bool
    query_key_norm: bool
    tied: bool

    @classmethod
    def from_config(cls, config: DecoderConfig, vocabulary_size: int) -> DecoderShape:
        """Return the shape of the decoder with these options."""
        return cls(
            vocabulary_size=vocabulary_size,
            layers=config.layers,
            width=config.width,
            hidden=config.hidden,
            heads=config.heads,
            key_heads=config.key_heads,
            head_dim=config.key_features,
            gated=config.feed_forward_activation != "relu2",
            sub_norms=config.has_sub_norms,
            query_key_norm=config.has_query_key_norm,
            tied=config.tied,
        )

    @classmethod
    def from_options(
        cls, architecture: str, options: Mapping[str, Any], vocabulary_size: int
    ) -> DecoderShape:
        """Return the shape of a published model of ``architecture`` with these options."""
        preset = {str(name): preset for name, preset in PRESETS.items()}[architecture]
        return cls(
            vocabulary_size=vocabulary_size,
            layers=options["layers"],
            width=options["width"],
            hidden=options["feed_forward"],
            heads=options["heads"],
            key_heads=options["kv_heads"],
            head_dim=options["head_dim"],
            gated=preset.activation != "relu2",
            sub_norms=preset.sub_norms,
            query_key_norm=preset.query_key_norm,
            tied=options["tie_embeddings"],
        )

    def block(self, *, biases: bool = True) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor of a block by its path in the block, in the order of
        computation.
        """
        queries = self.heads * self.head_dim
        keys = self.key_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "attention.norm": (self.width,),
            "attention.query": (queries, self.width),
            "attention.key": (keys, self.width),
            "attention.value": (keys, self.width),
        }
        if biases:
            shapes["attention.biases.query"] = (queries,)
            shapes["attention.biases.key"] = (keys,)
            shapes["attention.biases.value"] = (keys,)
        if self.query_key_norm:
            shapes["attention.query_norm"] = (self.head_dim,)
            shapes["attention.key_norm"] = (self.head_dim,)
        if self.sub_norms:
            shapes["attention.output_norm"] = (queries,)
        shapes["attention.output"] = (self.width, queries)
        shapes["feed_forward.norm"] = (self.width,)
        if self.gated:
            shapes["feed_forward.gate"] = (self.hidden, self.width)
        shapes["feed_forward.up"] = (self.hidden, self.width)
        if self.sub_norms:
            shapes["feed_forward.hidden_norm"] = (self.hidden,)
        shapes["feed_forward.down"] = (self.width, self.hidden)
        return shapes

    def tensors(self, *, biases: bool = True) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the path and the shape of every tensor.

        This is a generator because the number of layers may come from a file that claims billions.
        """
        block = self.block(biases=biases)
        yield "embedding", (self.vocabulary_size, self.width)
        for layer in range(self.layers):
            for path, shape in block.items():
                yield f"blocks.{layer}.{path}", shape
        yield "final_norm", (self.width,)
        if not self.tied:
            yield "head", (self.vocabulary_size, self.width)


@frozen
class TensorNames:
    """The names that another format gives to the tensors of a decoder.

    Attributes:
        blocks: what its names of blocks begin with, up to the number of the block.
        outside: its names by path, outside of blocks.
        inside: its names by path, inside a block.
    """

    blocks: str
    outside: Mapping[str, str]
    inside: Mapping[str, str]

    def name(self, path: str) -> str:
        """Return the format's name of the tensor at ``path``."""
        block = _BLOCK.fullmatch(path)
        if block is None:
            return self.outside[path]
        return f"{self.blocks}{block[1]}.{self.inside[block[2]]}"
