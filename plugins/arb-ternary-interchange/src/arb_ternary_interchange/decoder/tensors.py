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
from pathlib import Path
from typing import Any, Final

from attrs import frozen

from arb_ternary.errors import DataError
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

#: Options of a published model that decide its shapes.
_SIZES: Final = (
    "width",
    "layers",
    "heads",
    "kv_heads",
    "head_dim",
    "feed_forward",
    "tie_embeddings",
)
_BLOCK: Final = re.compile(r"blocks\.(\d+)\.(.+)")


def is_bias(path: str) -> bool:
    """Whether a path is that of a bias."""
    return ".biases." in path


def is_linear(path: str) -> bool:
    """Whether a path is that of the matrix of a linear; the head is one."""
    block = _BLOCK.fullmatch(path)
    return path == "head" if block is None else block[2] in LINEARS


@frozen
class DecoderShape:
    """Which tensors a decoder has, and their shapes.

    Attributes:
        config: its options; those that say how weights are held do not matter.
        vocabulary_size: rows of embedding and head.
    """

    config: DecoderConfig
    vocabulary_size: int

    @classmethod
    def of_published(
        cls, where: Path, architecture: str, options: Mapping[str, Any], vocabulary_size: int
    ) -> DecoderShape:
        """Return the shape of a published model of ``architecture`` with these options.

        Raises:
            DataError: no decoder has such sizes; the message begins with ``where``.
        """
        preset = {str(name): preset for name, preset in PRESETS.items()}[architecture]
        try:
            config = DecoderConfig(
                **{name: options[name] for name in _SIZES},
                activation=preset.activation,
                sub_norms=preset.sub_norms,
                query_key_norm=preset.query_key_norm,
            )
        except ValueError as error:
            raise DataError(f"{where}: no decoder has such sizes: {error.args[0]}") from error
        return cls(config, vocabulary_size)

    def block(self, *, biases: bool = True) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor of a block by its path in the block, in the order of
        computation.
        """
        config = self.config
        width = config.width
        queries = config.heads * config.key_features
        keys = config.key_heads * config.key_features
        shapes: dict[str, tuple[int, ...]] = {
            "attention.norm": (width,),
            "attention.query": (queries, width),
            "attention.key": (keys, width),
            "attention.value": (keys, width),
        }
        if biases:
            shapes["attention.biases.query"] = (queries,)
            shapes["attention.biases.key"] = (keys,)
            shapes["attention.biases.value"] = (keys,)
        if config.has_query_key_norm:
            shapes["attention.query_norm"] = (config.key_features,)
            shapes["attention.key_norm"] = (config.key_features,)
        if config.has_sub_norms:
            shapes["attention.output_norm"] = (queries,)
        shapes["attention.output"] = (width, queries)
        shapes["feed_forward.norm"] = (width,)
        if config.feed_forward_activation != "relu2":
            shapes["feed_forward.gate"] = (config.hidden, width)
        shapes["feed_forward.up"] = (config.hidden, width)
        if config.has_sub_norms:
            shapes["feed_forward.hidden_norm"] = (config.hidden,)
        shapes["feed_forward.down"] = (width, config.hidden)
        return shapes

    def tensors(self, *, biases: bool = True) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the path and the shape of every tensor.

        This is a generator because the number of layers may come from a file that claims billions.
        """
        block = self.block(biases=biases)
        width = self.config.width
        yield "embedding", (self.vocabulary_size, width)
        for layer in range(self.config.layers):
            for path, shape in block.items():
                yield f"blocks.{layer}.{path}", shape
        yield "final_norm", (width,)
        if not self.config.tied:
            yield "head", (self.vocabulary_size, width)


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
