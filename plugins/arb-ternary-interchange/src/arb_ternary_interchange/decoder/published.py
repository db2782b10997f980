"""What a format's plugin tells of a published model; :mod:`.importing` makes a run of it.

Tensors go by the paths of the decoder's modules: ``embedding``, ``final_norm``, ``head`` (absent
where tied), ``blocks.{i}.attention.{norm,query,key,value,output,output_norm,query_norm,key_norm}``,
``blocks.{i}.attention.biases.{query,key,value}`` and
``blocks.{i}.feed_forward.{norm,gate,up,down,hidden_norm}``. The planes of rotation of queries and
keys are half-split, as in Hugging Face's weights.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol

from attrs import frozen
from torch import Tensor


@frozen(eq=False)
class ScaledTrits:
    """A ternary matrix with float scales: ``W[n, k] = trits[n, k] * scale[n, k // group_size]``.

    Attributes:
        trits: int8 ``[N, K]``.
        scale: float32: ``[1]`` for the whole matrix, ``[N, 1]`` for rows, ``[N, J]`` for groups.
        group_size: columns that share a scale; ``K`` where a row or the matrix does.
    """

    trits: Tensor
    scale: Tensor
    group_size: int


class PublishedModel(Protocol):
    """A model in another format, read tensor by tensor.

    Attributes:
        architecture: ``llama``, ``qwen3``, ``arcee`` or ``bitnet``.
        options: options of the decoder that the format knows: ``width``, ``layers``, ``heads``,
            ``kv_heads``, ``head_dim``, ``feed_forward``, ``activation``, ``max_length``,
            ``norm_eps``, ``rotary_base``, ``tie_embeddings`` and others. How weights are held is
            the importer's to choose.
        vocabulary_size: rows of the embedding.
        tokenizer: ``to_json`` of a tokenizer, or None where the format has none that is known.
        unmapped: what is in the format and has no place in the decoder, one sentence each.
    """

    @property
    def architecture(self) -> str: ...

    @property
    def options(self) -> Mapping[str, Any]: ...

    @property
    def vocabulary_size(self) -> int: ...

    @property
    def tokenizer(self) -> Mapping[str, Any] | None: ...

    @property
    def unmapped(self) -> tuple[str, ...]: ...

    def names(self) -> Collection[str]:
        """The tensors that there are, by the paths above."""

    def read(self, name: str) -> Tensor | ScaledTrits:
        """One tensor from disk: trits with their scales, or floats (a matrix, or a vector for norms
        and biases).
        """


def part_shapes(options: Mapping[str, Any], vocabulary_size: int) -> dict[str, tuple[int, ...]]:
    """The logical shape of every tensor that a decoder may have, those of a block without
    ``blocks.{i}.``.

    Args:
        options: see :class:`PublishedModel`; ``width``, ``feed_forward``, ``heads``, ``kv_heads``
            and ``head_dim``.
        vocabulary_size: rows of embedding and head.
    """
    width = options["width"]
    hidden = options["feed_forward"]
    head_dim = options["head_dim"]
    queries = options["heads"] * head_dim
    keys = options["kv_heads"] * head_dim
    return {
        "embedding": (vocabulary_size, width),
        "final_norm": (width,),
        "head": (vocabulary_size, width),
        "attention.norm": (width,),
        "attention.query": (queries, width),
        "attention.key": (keys, width),
        "attention.value": (keys, width),
        "attention.biases.query": (queries,),
        "attention.biases.key": (keys,),
        "attention.biases.value": (keys,),
        "attention.query_norm": (head_dim,),
        "attention.key_norm": (head_dim,),
        "attention.output_norm": (queries,),
        "attention.output": (width, queries),
        "feed_forward.norm": (width,),
        "feed_forward.gate": (hidden, width),
        "feed_forward.up": (hidden, width),
        "feed_forward.hidden_norm": (hidden,),
        "feed_forward.down": (width, hidden),
    }
