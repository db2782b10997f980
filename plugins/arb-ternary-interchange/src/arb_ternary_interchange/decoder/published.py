"""A published model as the reader of its format presents it; :mod:`.conversion` makes a run of it.

Tensors go by the paths in :mod:`.tensors`. The planes of rotation of queries and keys are
half-split, as in Hugging Face's weights.
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
        group_size: columns that share a scale; ``K`` if a row or the matrix does.
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
            ``norm_eps``, ``rotary_base``, ``tie_embeddings`` and others. The importer decides how
            weights are held.
        vocabulary_size: rows of the embedding.
        tokenizer: ``to_json`` of a tokenizer, or None if the format has none that is known.
        unmapped: what the file holds and the decoder cannot, one sentence each.
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
        """Return the paths of all tensors."""

    def read(self, name: str) -> Tensor | ScaledTrits:
        """Read one tensor from disk: trits with their scales, or floats (a matrix, or a vector for
        norms and biases).
        """
