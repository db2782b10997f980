"""Options of the decoder."""

from __future__ import annotations

from typing import Any, Final, Literal

from attrs import Attribute, frozen
from attrs.converters import optional as optional_converter
from attrs.validators import in_, optional

from arb_ternary.config.options import Condition, Rule, option, positive, when, whole
from arb_ternary.optim.protocol import Planned
from arb_ternary.specs import TrainedPart
from arb_ternary_text.models.architectures import PRESETS, Activation, preset_of
from arb_ternary_text.models.checks import check_options

FloatPart = Literal["embedding", "head", "norms", "linears"]

#: The parts of a decoder that ``float_parts`` can name. With all of them float the decoder is the
#: float baseline.
FLOAT_PARTS: tuple[FloatPart, ...] = ("embedding", "head", "norms", "linears")

#: Numbers of trits that a factor or gain can be 1 plus the mean of: powers of two, so that the mean
#: is a sum of ternary weights.
VECTOR_TRITS: Final = (4, 8, 16, 32)

#: Largest distance of a constant power-of-two factor from 1: beyond it float16 activations
#: overflow or vanish.
MAX_SCALE_EXPONENT = 16

#: More experts, blocks and features than any model has: bounds against a mistyped number that would
#: allocate for minutes.
MAX_EXPERTS = 4096
MAX_LAYERS = 4096
MAX_FEATURES = 2**20
#: Passes in which tokens choose experts again.
_MAX_PASSES: Final = 1024


_count = whole(1)
_size = whole(1, MAX_FEATURES)
#: Planes are numbered in 16 bits.
_features = whole(1, 2**16)
_scale_exponent = whole(-MAX_SCALE_EXPONENT, MAX_SCALE_EXPONENT)


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


# --- when options take effect


def _float_parts_lack(*parts: FloatPart) -> Condition:
    """Return the condition that one of ``parts``, or the gains of norms, are ternary."""

    def holds(options: DecoderConfig, run: Any, plan: Any) -> bool:
        return options.ternary_gains or not set(parts) <= set(options.float_parts)

    *others, last = parts
    return Condition(holds, f"{', '.join(others)} and {last} are all in 'float_parts'")


def _linears_vote(options: DecoderConfig, run: Any, plan: Planned | None) -> bool:
    if run is None or options.ternary_linears:
        return True
    # A phase that changes the model may put ternary linears where there were none.
    changes_model = any(hasattr(phase.options, "planned_in") for phase in run.phases)
    return changes_model and plan is not None and "ternary" in plan.kinds | plan.idle


_decoupled = when("attention", "decoupled")
_with_experts = when("experts")
_learned_gains = Condition(
    lambda options, run, plan: run is None or "norms" not in options.float_parts,
    "norms among the 'float_parts' have gains anyway",
)
_any_gains = Condition(
    lambda options, run, plan: options.learned_norms or "norms" in options.float_parts,
    "norms have gains only with 'learned_norms', or with norms in 'float_parts'",
)
_inner_norms = Condition(
    lambda options, run, plan: options.has_sub_norms or options.has_query_key_norm,
    "neither 'sub_norms' nor 'query_key_norm' is set",
)
_voting_linears = Condition(_linears_vote, "no linear learns by votes")
_vectors = (
    Condition(
        lambda options, run, plan: options.row_scales or options.ternary_gains,
        "there are neither 'row_scales' nor ternary gains ('learned_norms')",
    ),
    Condition(
        lambda options, run, plan: options.ternary_gains or _linears_vote(options, run, plan),
        "no linear learns by votes, and no gain",
    ),
)
_ternary_embedding = Condition(
    lambda options, run, plan: "embedding" not in options.float_parts,
    "'float_parts' names embedding",
)


@frozen(kw_only=True)
class DecoderConfig:
    """A decoder-only transformer; the vocabulary comes from the data.

    The default is pure: every weight is ternary, no parameter and no buffer is float. Each linear
    reads an RMS-normalised input, as in BitNet. ``float_parts`` replaces parts by their float32
    counterparts. With all four the same architecture is the float baseline.
    """

    width: int = option(256, "features of the residual stream", validator=_size)
    layers: int = option(4, "number of blocks", validator=whole(1, MAX_LAYERS))
    heads: int = option(4, "query heads", validator=_size)
    kv_heads: int | None = option(
        None,
        "key and value heads, each shared by heads / kv_heads query heads; null = heads",
        validator=optional(_size),
    )
    head_dim: int | None = option(
        None,
        "features of a head, even; with decoupled attention, features of its values; null = width "
        "/ heads",
        validator=optional(_size),
    )
    feed_forward: int | None = option(
        None,
        "hidden features of a feed-forward layer; null = 4 width for relu2, else 8/3 width rounded "
        "up to a multiple of 32",
        validator=optional(_size),
    )
    architecture: Literal["llama", "qwen3", "arcee", "bitnet"] | None = option(
        None,
        "preset that other programs run too; it decides activation, sub_norms, query_key_norm and "
        "(bitnet) tie_embeddings where these are null; null = no preset",
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
        "decoupled = scores are the sum of a semantic part without positions and a geometric part "
        "with rotary positions",
        validator=in_(("standard", "decoupled")),
    )
    sem_dim: int | None = option(
        None,
        "semantic features of each head's queries and keys",
        validator=optional(_features),
        active_when=_decoupled,
    )
    geo_dim: int | None = option(
        None,
        "geometric features of each head's queries and keys, even",
        validator=optional(_features),
        active_when=_decoupled,
    )
    rotary_dim: int | None = option(
        None,
        "features of the rotary embedding whose planes the geometric features choose from; null = "
        "geo_dim",
        validator=optional(_features),
        active_when=_decoupled,
    )
    attention_gate: bool = option(
        False,
        "each head has a float gate that weighs its geometric against its semantic scores",
        active_when=_decoupled,
    )
    null_key_value: bool = option(
        False,
        "each key head has a learned float key and value that belong to no token and are visible "
        "to every position",
        active_when=_decoupled,
    )
    tie_query_key: bool = option(
        False,
        "semantic keys are the semantic queries; needs as many kv_heads as heads",
        active_when=_decoupled,
    )
    causal: bool = option(
        True,
        "a position sees only itself and earlier ones; false = all (masked objectives)",
    )
    rotary_base: float = option(
        10000.0,
        "longest wavelength of the rotary embedding over 2 pi",
        validator=Rule("greater than 1", lambda value: value > 1, {"exclusiveMinimum": 1}),
    )
    rotary_factors: tuple[float, ...] | None = option(
        None,
        "factors by which the planes of a head turn slower: head_dim / 2 of them (decoupled: "
        "rotary_dim / 2); null = 1 for all",
        validator=optional(_positive_numbers),
        converter=optional_converter(tuple),
    )
    rotary_scaling: float = option(
        1.0, "positions are divided by this before the rotary embedding", validator=positive
    )
    max_length: int = option(512, "context: longest sequence, in tokens", validator=_count)
    sliding_window: int | None = option(
        None,
        "positions that a position sees, itself included; sequences may then be longer than "
        "max_length; null = all",
        validator=optional(_count),
    )
    experts: int = option(
        0, "experts of each feed-forward layer; 0 = dense", validator=whole(0, MAX_EXPERTS)
    )
    experts_per_token: int = option(
        2,
        "experts that a token is routed to in one pass",
        validator=_count,
        active_when=_with_experts,
    )
    max_moe_iters: int = option(
        1,
        "most passes through the experts: a token is routed again from its refined state until "
        "its choice repeats",
        validator=whole(1, _MAX_PASSES),
        active_when=_with_experts,
    )
    tie_embeddings: bool | None = option(
        None,
        "the head uses the embedding's weights; null = the architecture's, else false",
    )
    group_size: Literal[32, 64, 128, 256, "row", "tensor"] = option(
        128,
        "weights of a row that share an exponent, in linears and head; tensor = all weights of a "
        "matrix, whose exponent is then frozen",
        validator=in_((32, 64, 128, 256, "row", "tensor")),
        active_when=_voting_linears,
    )
    activations: Literal["int8", "float"] = option(
        "int8",
        "precision of the input of each linear: int8 with one scale per token, or float",
        validator=in_(("int8", "float")),
    )
    gradients: Literal["float", "int8"] = option(
        "float",
        "precision of the gradients that ternary modules multiply with",
        validator=in_(("float", "int8")),
        active_when=_float_parts_lack("embedding", "head", "linears"),
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
        active_when=_learned_gains,
    )
    inner_gains: bool = option(
        False,
        "sub-norms and the norms of queries and keys have a learned gain like the pre-norms",
        active_when=(_any_gains, _inner_norms),
    )
    sub_norms: bool | None = option(
        None,
        "normalise the input of the output and down projections too; null = the architecture's, "
        "else true",
    )
    query_key_norm: bool | None = option(
        None,
        "normalise each head's queries and keys; null = the architecture's, else false",
    )
    norm_eps: float = option(1e-6, "added to the mean square in every norm", validator=positive)
    stored_eps: bool = option(
        False,
        "each sub-norm and each norm of queries and keys has an eps of its own, which is saved "
        "with the model; published weights may need it",
        active_when=_inner_norms,
    )
    query_key_value_bias: bool = option(False, "queries, keys and values have a float bias")
    linear_scales: bool = option(
        False,
        "each ternary linear has a constant float factor in addition to its exponents; published "
        "weights "
        "may need it",
        active_when=_voting_linears,
    )
    row_scales: bool = option(
        False,
        "each row of a ternary linear has a learned factor in addition to its exponents; it is a "
        "float, trained like other float parts, or, with vector_trits, ternary",
        active_when=_voting_linears,
    )
    vector_trits: Literal[4, 8, 16, 32] | None = option(
        None,
        "number of trits that each factor of row_scales and each ternary gain is 1 plus the mean "
        "of, from 0 to 2; null = float factors, and gains of one trit",
        validator=optional(in_(VECTOR_TRITS)),
        active_when=_vectors,
    )
    scale_rule: Literal["residual", "frozen"] = option(
        "residual",
        "how the exponents of ternary linears, head and gains learn: by votes, or not at all",
        validator=in_(("residual", "frozen")),
        active_when=_float_parts_lack("head", "linears"),
    )
    vote_bits: Literal[8, 4, 2] = option(
        8,
        "bits per accumulator of votes; 2 hold the votes of one step only",
        validator=in_((8, 4, 2)),
        active_when=_float_parts_lack("embedding", "head", "linears"),
    )
    embedding_scale_rule: Literal["residual", "frozen", "correlation"] = option(
        "residual",
        "how the exponents of a ternary embedding learn: by votes, not at all, or by the "
        "correlation of gradient and trits",
        validator=in_(("residual", "frozen", "correlation")),
        active_when=_ternary_embedding,
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
        "the head starts at zero, so that all ids are equally likely before the first step",
    )
    zero_residual: bool = option(
        False,
        "blocks start as the identity: output and down projections are initialised to zero",
    )

    def __attrs_post_init__(self) -> None:
        check_options(self)

    def planned(self) -> Planned:
        """Return what an optimizer will find in the decoder."""
        embedding = "embedding" not in self.float_parts
        gains = self.ternary_gains
        linears = self.ternary_linears

        kinds: set[TrainedPart] = set()
        if embedding or gains or linears:
            kinds.add("ternary")
        if self.float_parts or self.float_vectors:
            kinds.add("float")

        # The gradient of a linear can be an integer only if its input is.
        integers = embedding or gains or (linears and self.activations == "int8")
        by_scale_rule = self.scale_rule == "residual" and (gains or linears)
        by_embedding = self.embedding_scale_rule == "residual" and embedding
        return Planned(
            kinds=frozenset(kinds),
            matrices=bool({"embedding", "head", "linears"} & set(self.float_parts)),
            vote_bits=self.vote_bits,
            integers=self.gradients == "int8" and integers,
            exponents=by_scale_rule or by_embedding,
        )

    @property
    def ternary_linears(self) -> bool:
        """Whether a linear of the blocks, or a head of its own, is ternary."""
        if "linears" not in self.float_parts:
            return True
        return "head" not in self.float_parts and not self.tied

    @property
    def feed_forward_activation(self) -> Activation:
        """The non-linearity of a feed-forward layer."""
        if self.activation is not None:
            return self.activation
        return preset_of(self.architecture).activation

    @property
    def has_sub_norms(self) -> bool:
        """Whether the input of the output and down projections is normalised."""
        if self.sub_norms is not None:
            return self.sub_norms
        return preset_of(self.architecture).sub_norms

    @property
    def has_query_key_norm(self) -> bool:
        """Whether queries and keys are normalised."""
        if self.query_key_norm is not None:
            return self.query_key_norm
        return preset_of(self.architecture).query_key_norm

    @property
    def tied(self) -> bool:
        """Whether the head uses the embedding's weights."""
        if self.tie_embeddings is not None:
            return self.tie_embeddings
        return bool(preset_of(self.architecture).tied)

    @property
    def exponent_groups(self) -> Literal[32, 64, 128, 256, "row"]:
        """``group_size`` as modules take it: one exponent per matrix is kept as equal row ones."""
        return "row" if self.group_size == "tensor" else self.group_size

    @property
    def ternary_gains(self) -> bool:
        """Whether norms have learned gains that are ternary."""
        return self.learned_norms and "norms" not in self.float_parts

    @property
    def key_heads(self) -> int:
        """Number of key and value heads."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def value_features(self) -> int:
        """Features of the values of one head."""
        return self.width // self.heads if self.head_dim is None else self.head_dim

    @property
    def key_features(self) -> int:
        """Features of the queries and keys of one head."""
        if self.attention == "standard":
            return self.value_features
        return (self.sem_dim or 0) + (self.geo_dim or 0)

    @property
    def rotary_features(self) -> int:
        """Features of the rotary embedding: two per plane."""
        if self.attention == "standard":
            return self.value_features
        return self.rotary_dim or self.geo_dim or 0

    @property
    def hidden(self) -> int:
        """Hidden features of a feed-forward layer."""
        if self.feed_forward is not None:
            return self.feed_forward
        if self.feed_forward_activation == "relu2":
            return 4 * self.width
        # Three matrices of 8/3 width hold as many weights as two of 4 width (Shazeer, GLU Variants,
        # 2020). Rounded up to a multiple of 32.
        return -(-8 * self.width // 96) * 32

    @property
    def float_vectors(self) -> bool:
        """Whether there are float vectors that learn: biases, gates, null keys, factors of rows."""
        float_factors = self.row_scales and self.ternary_linears and self.vector_trits is None
        return (
            float_factors or self.query_key_value_bias or self.attention_gate or self.null_key_value
        )

    @property
    def pure(self) -> bool:
        """Whether no part is float."""
        return not (self.float_parts or self.float_vectors or self.linear_scales)
