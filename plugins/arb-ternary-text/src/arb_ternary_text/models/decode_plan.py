"""A plain decoder as a kernel sees it: its tensors, sizes and kinds, with nothing of its modules.

The kernel ``decode_step`` of a backend takes a :class:`DecoderPlan`; who makes one is
:mod:`arb_ternary_text.models.native_decode`.
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
        packed, exponent, shape: as kernels take them.
        factor: float32 ``[1]``, which multiplies the product, or ``[N]``, one for each row of the
            weight; None = 1.
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
        gain: float ``[features]``; None = 1, or ``row``.
        row: the gain as a ternary weight of one row.
    """

    eps: float
    gain: Tensor | None = None
    row: WeightPlan | None = None


@frozen(eq=False)
class LayerPlan:
    """One block. Norms that are None are left out; so is the gate of an activation that has
    none.
    """

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
    """All of a decoder that one token passes.

    Attributes:
        width, heads, key_heads, features, hidden, vocabulary: ``D``, ``H``, ``G``, ``C``, ``F``,
            ``V``.
        activation: of the feed-forward layers.
        speeds: angle of each of the ``C / 2`` planes, for a position of 1.
        embedding: a ternary weight ``[V, D]``, or floats.
        layers: in the order in which they run.
        final_norm: in front of the head.
        head: a ternary weight ``[V, D]``; None: the step ends with the final norm.
        logit_scale: multiplies what ``head`` gives.
        dtype: of the result, and of a cache that is not rounded to int8.
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
