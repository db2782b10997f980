"""Options of the decoder, checked against each other when they are set."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, Literal

from attrs import Attribute, frozen
from attrs.converters import optional as optional_converter
from attrs.validators import in_, instance_of, optional

from arb_ternary.config.fields import without_effect
from arb_ternary.config.options import Rule, option, positive
from arb_ternary.optim.protocol import Planned
from arb_ternary.specs import TrainedPart
from arb_ternary_text.models.architectures import PRESETS, Activation, preset_of
from arb_ternary_text.models.checks import check_options

FloatPart = Literal["embedding", "head", "norms", "linears"]

# : The parts of a decoder that ``float_parts`` can name; all of them together make the float
# baseline.
FLOAT_PARTS: tuple[FloatPart, ...] = ("embedding", "head", "norms", "linears")

# : Trits that a number can be 1 plus the mean of: powers of two, so that the mean is a sum of
# ternary weights.
VECTOR_TRITS: Final = (4, 8, 16, 32)

# : Largest distance of a constant power-of-two factor from 1: beyond it float16 activations
# overflow or vanish.
MAX_SCALE_EXPONENT = 16

# : More experts than any model has; a bound against a mistyped number that would allocate for
# minutes.
MAX_EXPERTS = 4096


def _whole(low: int, high: int | None = None) -> Rule:
    text = (
        f"a whole number of at least {low}"
        if high is None
        else f"a whole number from {low} to {high}"
    )
    schema = {"minimum": low} if high is None else {"minimum": low, "maximum": high}
    return Rule(
        text,
        lambda value: type(value) is int and low <= value and (high is None or value <= high),
        schema,
    )


_count = _whole(1)
#: Planes are numbered in 16 bits.
_features = _whole(1, 2**16)
_scale_exponent = _whole(-MAX_SCALE_EXPONENT, MAX_SCALE_EXPONENT)


def _known_parts(
    _instance: object, attribute: Attribute[tuple[FloatPart, ...]], value: tuple[FloatPart, ...]
) -> None:
    for part in value:
        if part not in FLOAT_PARTS:
            raise ValueError(
                f"{attribute.name!r} names the unknown part {part!r}; parts are "
                f"{', '.join(FLOAT_PARTS)}"
            )
    if len(set(value)) != len(value):
        raise ValueError(f"{attribute.name!r} names a part twice: {', '.join(value)}")


def _all_positive(value: tuple[Any, ...]) -> bool:
    return all(each > 0 for each in value)


_positive_numbers = Rule(
    "numbers greater than 0", _all_positive, {"items": {"exclusiveMinimum": 0}}
)


@frozen(kw_only=True)
class DecoderConfig:
    """A decoder-only transformer; the vocabulary comes from the data.

    The default is pure: every weight is ternary, no parameter and no buffer is float. Each linear
    reads an RMS-normalised input (BitNet). ``float_parts`` swaps parts for their float32
    counterparts; with all four the same architecture is the float baseline.
    """

    width: int = option(256, "features of the residual stream", validator=_count)
    layers: int = option(4, "number of blocks", validator=_count)
    heads: int = option(4, "query heads", validator=_count)
    kv_heads: int | None = option(
        None,
        "key and value heads, each shared by heads / kv_heads query heads; null = heads",
        validator=optional(_count),
    )
    head_dim: int | None = option(
        None,
        "features of a head, even; those of its values where attention is decoupled; null = width "
        "/ heads",
        validator=optional(_count),
    )
    feed_forward: int | None = option(
        None,
        "hidden features of a feed-forward layer; null = 4 width for relu2, else 8/3 width rounded "
        "up to 32",
        validator=optional(_count),
    )
    architecture: Literal["llama", "qwen3", "arcee", "bitnet"] | None = option(
        None,
        "one that other programs compute too: it decides activation, sub_norms, query_key_norm "
        "and, bitnet, tie_embeddings, where these are null; null = those below",
        validator=optional(in_(tuple(PRESETS))),
    )
    activation: Literal["relu2", "swiglu", "reglu2"] | None = option(
        None,
        "feed-forward non-linearity: relu(up)^2, silu(gate) * up, or relu(gate)^2 * up; null = the "
        "architecture's, else relu2",
        validator=optional(in_(("relu2", "swiglu", "reglu2"))),
    )
    attention: Literal["standard", "decoupled"] = option(
        "standard",
        "decoupled = scores are the sum of a semantic part without positions and a geometric one "
        "with rotary positions",
        validator=in_(("standard", "decoupled")),
    )
    sem_dim: int | None = option(
        None,
        "semantic features of a head's queries and keys, in decoupled attention",
        validator=optional(_features),
    )
    geo_dim: int | None = option(
        None,
        "geometric features of a head's queries and keys, even, in decoupled attention",
        validator=optional(_features),
    )
    rotary_dim: int | None = option(
        None,
        "the planes that geometric features turn with are some of those of a head of so many; null "
        "= geo_dim",
        validator=optional(_features),
    )
    attention_gate: bool = option(
        False,
        "each head has a float gate that weighs its geometric against its semantic scores, in "
        "decoupled attention",
        validator=instance_of(bool),
    )
    null_key_value: bool = option(
        False,
        "each key head has a float key and value of no token, which every position sees, in "
        "decoupled attention",
        validator=instance_of(bool),
    )
    tie_query_key: bool = option(
        False,
        "semantic keys are the semantic queries, in decoupled attention; needs as many kv_heads as "
        "heads",
        validator=instance_of(bool),
    )
    causal: bool = option(
        True,
        "a position sees only itself and earlier ones; false = all (masked objectives)",
        validator=instance_of(bool),
    )
    rotary_base: float = option(
        10000.0,
        "longest wavelength of the rotary embedding over 2 pi",
        validator=Rule("greater than 1", lambda value: value > 1, {"exclusiveMinimum": 1}),
    )
    rotary_factors: tuple[float, ...] | None = option(
        None,
        "plane p of a head turns slower by the p-th of these head_dim / 2 (decoupled: rotary_dim / "
        "2) factors; null = 1 for all",
        validator=optional(_positive_numbers),
        converter=optional_converter(tuple),
    )
    rotary_scaling: float = option(
        1.0, "positions are divided by it before they turn queries and keys", validator=positive
    )
    max_length: int = option(512, "context: longest sequence, in tokens", validator=_count)
    sliding_window: int | None = option(
        None,
        "positions that a position sees, itself included; sequences may then be longer than "
        "max_length; null = all",
        validator=optional(_count),
    )
    experts: int = option(
        0, "experts of each feed-forward layer; 0 = dense", validator=_whole(0, MAX_EXPERTS)
    )
    experts_per_token: int = option(
        2, "experts that a token is routed to in one pass", validator=_count
    )
    max_moe_iters: int = option(
        1,
        "most passes through the experts: a token is routed again, from its refined state, until "
        "its choice repeats",
        validator=_count,
    )
    tie_embeddings: bool | None = option(
        None,
        "the head uses the embedding's weights; null = the architecture's, else false",
        validator=optional(instance_of(bool)),
    )
    group_size: Literal[32, 64, 128, 256, "row", "tensor"] = option(
        128,
        "weights of a row that share an exponent in linears and head; tensor = all of a matrix, "
        "whose exponent is then frozen",
        validator=in_((32, 64, 128, 256, "row", "tensor")),
    )
    activations: Literal["int8", "float"] = option(
        "int8",
        "precision of what enters each linear: int8 with one scale a token, or float",
        validator=in_(("int8", "float")),
    )
    gradients: Literal["float", "int8"] = option(
        "float",
        "precision of the gradients that ternary modules multiply with",
        validator=in_(("float", "int8")),
    )
    float_parts: tuple[FloatPart, ...] = option(
        (),
        "parts kept in float32: embedding, head, norms (learned float gains), linears; empty = "
        "pure ternary",
        validator=_known_parts,
        converter=tuple,
    )
    learned_norms: bool = option(
        False,
        "pre-norms and final norm have a learned gain, ternary unless float_parts names norms",
        validator=instance_of(bool),
    )
    inner_gains: bool = option(
        False,
        "sub-norms and norms of queries and keys have a learned gain too, as the pre-norms have",
        validator=instance_of(bool),
    )
    sub_norms: bool | None = option(
        None,
        "normalise also what enters the output and down projections; null = the architecture's, "
        "else true",
        validator=optional(instance_of(bool)),
    )
    query_key_norm: bool | None = option(
        None,
        "normalise each head's queries and keys; null = the architecture's, else false",
        validator=optional(instance_of(bool)),
    )
    norm_eps: float = option(1e-6, "added to the mean square in every norm", validator=positive)
    stored_eps: bool = option(
        False,
        "each sub-norm, and each norm of queries and keys, has an eps of its own, saved with the "
        "model; published weights may need it",
        validator=instance_of(bool),
    )
    query_key_value_bias: bool = option(
        False, "queries, keys and values have a float bias", validator=instance_of(bool)
    )
    linear_scales: bool = option(
        False,
        "each ternary linear has a float factor beside its exponents, which does not learn; "
        "published weights may need it",
        validator=instance_of(bool),
    )
    row_scales: bool = option(
        False,
        "each ternary linear has a factor for each row beside its exponents: a float, which learns "
        "as float parts do, or, with vector_trits, ternary",
        validator=instance_of(bool),
    )
    vector_trits: Literal[4, 8, 16, 32] | None = option(
        None,
        "trits that each factor of row_scales and each ternary gain is 1 plus the mean of, from 0 "
        "to 2; null = float factors, and gains of one trit",
        validator=optional(in_(VECTOR_TRITS)),
    )
    scale_rule: Literal["residual", "frozen"] = option(
        "residual",
        "how the exponents of ternary linears, head and gains move: by votes, or not at all",
        validator=in_(("residual", "frozen")),
    )
    vote_bits: Literal[8, 4, 2] = option(
        8, "bits of an accumulator of votes; 2 hold one step's votes only", validator=in_((8, 4, 2))
    )
    embedding_scale_rule: Literal["residual", "frozen", "correlation"] = option(
        "residual",
        "how the exponents of a ternary embedding move: by votes, not at all, or by the gradient's "
        "correlation",
        validator=in_(("residual", "frozen", "correlation")),
    )
    residual_scale: int = option(
        0,
        "each block adds 2^residual_scale times its update to the stream",
        validator=_scale_exponent,
    )
    logit_scale: int = option(
        0, "logits are 2^logit_scale times the head's output", validator=_scale_exponent
    )
    zero_head: bool = option(
        False,
        "the head starts at zero, so that every id is as likely as another before the first step",
        validator=instance_of(bool),
    )
    zero_residual: bool = option(
        False,
        "blocks start as the identity: output and down projections are zero at birth",
        validator=instance_of(bool),
    )

    def __attrs_post_init__(self) -> None:
        check_options(self)

    def planned(self) -> Planned:
        """What an optimizer will find in the decoder."""
        embedding = "embedding" not in self.float_parts
        gains = self.ternary_gains
        whole = self.activations == "int8"  # then the gradient of a linear can be an integer too
        there: dict[TrainedPart, bool] = {
            "ternary": embedding or gains or self.ternary_linears,
            "float": bool(self.float_parts) or self.float_vectors,
        }
        return Planned(
            kinds=frozenset(kind for kind in there if there[kind]),
            matrices=bool({"embedding", "head", "linears"} & set(self.float_parts)),
            vote_bits=self.vote_bits,
            integers=self.gradients == "int8"
            and (embedding or gains or (whole and self.ternary_linears)),
            exponents=(embedding and self.embedding_scale_rule == "residual")
            or (self.scale_rule == "residual" and (gains or self.ternary_linears)),
        )

    def validate_in_run(self, run: Any, planned: Planned | None) -> Iterator[tuple[str, str]]:
        """See ``arb_ternary.optim.protocol.Planned``."""
        if "norms" in self.float_parts:
            yield from without_effect(
                self, "norms among the 'float_parts' have gains anyway", "learned_norms"
            )
        # A phase that changes the model may put ternary linears where there were none.
        changed = any(hasattr(phase.options, "planned_in") for phase in run.phases)
        added = changed and planned is not None and "ternary" in planned.kinds | planned.idle
        if not (self.ternary_linears or added):
            yield from without_effect(
                self, "no linear learns by votes", "group_size", "linear_scales", "row_scales"
            )
            if not self.ternary_gains:
                yield from without_effect(
                    self, "no linear learns by votes, and no gain", "vector_trits"
                )

    @property
    def ternary_linears(self) -> bool:
        """Whether a linear of the blocks, or a head of its own, is ternary."""
        return not {"linears", "head"} <= set(self.float_parts) and not (
            self.tied and "linears" in self.float_parts
        )

    @property
    def feed_forward_activation(self) -> Activation:
        """The non-linearity of a feed-forward layer."""
        return (
            preset_of(self.architecture).activation if self.activation is None else self.activation
        )

    @property
    def has_sub_norms(self) -> bool:
        """Whether what enters the output and down projections is normalised."""
        return preset_of(self.architecture).sub_norms if self.sub_norms is None else self.sub_norms

    @property
    def has_query_key_norm(self) -> bool:
        """Whether queries and keys are normalised."""
        return (
            preset_of(self.architecture).query_key_norm
            if self.query_key_norm is None
            else self.query_key_norm
        )

    @property
    def tied(self) -> bool:
        """Whether the head uses the embedding's weights."""
        return (
            bool(preset_of(self.architecture).tied)
            if self.tie_embeddings is None
            else self.tie_embeddings
        )

    @property
    def exponent_groups(self) -> Literal[32, 64, 128, 256, "row"]:
        """``group_size`` as modules take it: one exponent a matrix is held as equal ones, a row
        each.
        """
        return "row" if self.group_size == "tensor" else self.group_size

    @property
    def ternary_gains(self) -> bool:
        """Whether norms have learned gains that are ternary."""
        return self.learned_norms and "norms" not in self.float_parts

    @property
    def key_heads(self) -> int:
        """Key and value heads."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def value_features(self) -> int:
        """Features of the values of one head."""
        return self.width // self.heads if self.head_dim is None else self.head_dim

    @property
    def key_features(self) -> int:
        """Features of the queries and keys of one head."""
        return (
            self.value_features
            if self.attention == "standard"
            else (self.sem_dim or 0) + (self.geo_dim or 0)
        )

    @property
    def rotary_features(self) -> int:
        """Features of a head whose planes are those that there are, two a plane."""
        if self.attention == "standard":
            return self.value_features
        return self.rotary_dim or self.geo_dim or 0

    @property
    def kv_features(self) -> int:
        """Numbers that a cache holds for each token: keys and values of all layers."""
        return self.layers * self.key_heads * (self.key_features + self.value_features)

    @property
    def hidden(self) -> int:
        """Hidden features of a feed-forward layer."""
        if self.feed_forward is not None:
            return self.feed_forward
        # Three matrices of 8/3 width hold as many weights as two of 4 width (Shazeer, GLU Variants,
        # 2020).
        return (
            4 * self.width
            if self.feed_forward_activation == "relu2"
            else -(-8 * self.width // 96) * 32
        )

    @property
    def float_vectors(self) -> bool:
        """Whether there are float vectors that learn, whatever ``float_parts`` says: biases, gates,
        keys, factors.
        """
        rows = self.row_scales and self.ternary_linears and self.vector_trits is None
        return rows or self.query_key_value_bias or self.attention_gate or self.null_key_value

    @property
    def pure(self) -> bool:
        """Whether no part is float."""
        return not (self.float_parts or self.float_vectors or self.linear_scales)
