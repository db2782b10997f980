"""The layers of a manifest's topology, with the keys that they have in a manifest.

A key that the decoder has no option for is declared if one of its values asks for nothing; any
other value is a fault that names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, Literal

from attrs import frozen
from attrs.validators import optional

from arb_ternary.config.options import Rule, option, positive


def _only(value: Any, why: str) -> Rule:
    shown = {True: "true", False: "false", None: "null"}.get(value, repr(value))
    return Rule(f"{shown}: {why}", lambda given: given == value, {"const": value})


_no_bias = _only(False, "the decoder's linears have no bias")
_no_dropout = _only(0.0, "the decoder has no dropout")
_WIDTH: Final = "features of the residual stream"


@frozen(kw_only=True)
class EmbeddingLayer:
    """The token embedding; the vocabulary comes from the data."""

    d_model: int = option(help=_WIDTH, validator=positive)
    vocab_size: int | None = option(None, "number of token ids", validator=optional(positive))


@frozen(kw_only=True)
class RMSNormLayer:
    """A norm before a layer or before the head."""

    d_model: int = option(help=_WIDTH, validator=positive)
    eps: float | None = option(
        None, "added to the mean square; null = the decoder's default", validator=optional(positive)
    )
    elementwise_affine: bool | None = option(
        None, "whether it has a learned gain; null = as the decoder's options say"
    )


@frozen(kw_only=True)
class AttentionLayer:
    """Attention; ``sem_dim``, ``geo_dim`` and ``attn_dim`` count all heads together."""

    d_model: int = option(help=_WIDTH, validator=positive)
    n_heads: int = option(help="query heads", validator=positive)
    n_kv_heads: int | None = option(
        None, "key and value heads; null = n_heads", validator=optional(positive)
    )
    mode: Literal["standard", "gqa", "decoupled"] = option(
        "standard", "how queries and keys are made"
    )
    attn_dim: int | None = option(
        None, "features of all heads together; null = d_model", validator=optional(positive)
    )
    head_dim: int | None = option(
        None, "features of a head; null = d_model / n_heads", validator=optional(positive)
    )
    sem_dim: int | None = option(
        None,
        "semantic features of all query heads together; the decoder's own option counts one head",
        validator=optional(positive),
    )
    geo_dim: int | None = option(
        None,
        "geometric features of all query heads together; the decoder's own option counts one head",
        validator=optional(positive),
    )
    rope_enabled: bool = option(
        True,
        "rotary positions",
        validator=_only(True, "the decoder's attention has rotary positions"),
    )
    rope_base: float | None = option(
        None,
        "longest wavelength over 2 pi; null = the decoder's default",
        validator=optional(positive),
    )
    rope_scaling: Mapping[str, Any] | None = option(
        None,
        "scaled rotary positions",
        validator=_only(
            None, "give the decoder's options rotary_scaling and rotary_factors instead"
        ),
    )
    tie_qk: bool = option(False, "semantic keys are the semantic queries")
    null_attn: bool = option(False, "a key and a value that belong to no token")
    decoupled_gate: bool = option(False, "a learned weight of the two parts for each head")
    is_causal: bool = option(True, "a position attends only to itself and earlier ones")
    local_window: int | None = option(
        None, "positions that a position attends to; null = all", validator=optional(positive)
    )
    dropout_p: float = option(0.0, "fraction of attention that is dropped", validator=_no_dropout)
    bias: bool = option(
        False,
        "biases of the linears",
        validator=_only(
            False,
            "the decoder's output projection has none; for queries, keys and values give its "
            "query_key_value_bias",
        ),
    )


@frozen(kw_only=True)
class SwiGLULayer:
    """A feed-forward layer with ``silu(gate) * up``."""

    d_model: int = option(help=_WIDTH, validator=positive)
    d_ff: int = option(help="hidden features", validator=positive)
    bias: bool = option(False, "biases of the linears", validator=_no_bias)


@frozen(kw_only=True)
class GLULayer:
    """A feed-forward layer with a gate."""

    d_model: int = option(help=_WIDTH, validator=positive)
    d_ff: int = option(help="hidden features", validator=positive)
    activation: Literal["silu", "swiglu"] = option("silu", "activation function of the gate")
    bias: bool = option(False, "biases of the linears", validator=_no_bias)


@frozen(kw_only=True)
class MoELayer:
    """Feed-forward experts behind a router."""

    d_model: int = option(help=_WIDTH, validator=positive)
    d_ff: int = option(help="hidden features of an expert", validator=positive)
    num_experts: int = option(8, "number of experts", validator=positive)
    top_k: int = option(2, "number of experts that a token is routed to", validator=positive)
    bias: bool = option(False, "biases of the linears", validator=_no_bias)


@frozen(kw_only=True)
class LinearLayer:
    """The head: from the residual stream to logits."""

    d_in: int = option(help=_WIDTH, validator=positive)
    d_out: int = option(help="number of token ids", validator=positive)
    bias: bool = option(False, "a bias", validator=_no_bias)


FeedForward = SwiGLULayer | GLULayer | MoELayer
FEED_FORWARD: Final = (SwiGLULayer, GLULayer, MoELayer)

_ALL = (EmbeddingLayer, RMSNormLayer, AttentionLayer, *FEED_FORWARD, LinearLayer)
#: The class of a layer's keys, by its ``type``.
LAYERS: Final[Mapping[str, type[Any]]] = MappingProxyType({cls.__name__: cls for cls in _ALL})
#: The nearest type that the decoder has, by an unknown type.
NEAREST: Final = MappingProxyType(
    {
        "LayerNormLayer": "RMSNormLayer",
        "DenseLayer": "SwiGLULayer",
        "LoRALinearLayer": "LinearLayer",
        "RNNLayer": "AttentionLayer",
        "LSTMLayer": "AttentionLayer",
        "SSMLayer": "AttentionLayer",
        "ParallelTopology": "StackedTopology",
        "BranchingTopology": "StackedTopology",
        "GraphTopology": "StackedTopology",
        "CyclicTopology": "NestedTopology",
        "RecurrentTopology": "NestedTopology",
    }
)
