"""A plain decoder as the kernel ``text.decode_step`` sees it: tensors, sizes and kinds, no modules.

:mod:`arb_ternary_text.models.native_decode` makes a :class:`DecoderPlan` of a model.
"""

from __future__ import annotations

import torch
from attrs import field, frozen
from torch import Tensor

from arb_ternary.backends.protocol import WeightShape
from arb_ternary_text.models.architectures import Activation


@frozen(eq=False)
class WeightPlan:
    """A ternary weight, in the backend's layout.

    Attributes:
        packed: the trits, as kernels take them.
        exponent: the exponents, as kernels take them.
        shape: the logical shape.
        factor: float32 factors of the product: ``[1]``, or ``[N]`` with one per row of the weight;
            None = 1.
    """

    packed: Tensor
    exponent: Tensor
    shape: WeightShape
    factor: Tensor | None = None


@frozen(eq=False)
class NormPlan:
    """An RMSNorm.

    Attributes:
        eps: added to the mean square.
        gain: float gains ``[features]``; None = 1, or ``row``.
        row: the gain as a ternary weight of one row.
    """

    eps: float
    gain: Tensor | None = None
    row: WeightPlan | None = None


@frozen(eq=False)
class LayerPlan:
    """One block. Norms that are None are left out; ``relu2`` has no gate."""

    attention_norm: NormPlan | None
    query: WeightPlan
    key: WeightPlan
    value: WeightPlan
    query_norm: NormPlan | None
    key_norm: NormPlan | None
    output_norm: NormPlan | None
    output: WeightPlan
    feed_norm: NormPlan | None
    gate: WeightPlan | None
    up: WeightPlan
    hidden_norm: NormPlan | None
    down: WeightPlan
    residual_scale: float


@frozen(eq=False)
class DecoderPlan:
    """The parts of a decoder that a token passes.

    Attributes:
        width: features of the residual stream, ``D``.
        heads: query heads, ``H``.
        key_heads: key and value heads, ``G``.
        features: features of a head, ``C``.
        hidden: hidden features of a feed-forward layer, ``F``.
        vocabulary: number of token ids, ``V``.
        activation: non-linearity of the feed-forward layers.
        speeds: angle of each of the ``C / 2`` planes per position.
        embedding: a ternary weight ``[V, D]``, or floats.
        layers: the blocks in the order in which they run.
        final_norm: the norm in front of the head.
        head: a ternary weight ``[V, D]``; None: the step ends with the final norm.
        logit_scale: multiplies the product of ``head``.
        dtype: dtype of the result, and of a cache that is not rounded to int8.
    """

    width: int
    heads: int
    key_heads: int
    features: int
    hidden: int
    vocabulary: int
    activation: Activation
    speeds: tuple[float, ...] = field(repr=False)
    embedding: WeightPlan | Tensor
    layers: tuple[LayerPlan, ...]
    final_norm: NormPlan | None
    head: WeightPlan | None
    logit_scale: float
    dtype: torch.dtype
