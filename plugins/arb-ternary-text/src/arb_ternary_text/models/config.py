"""Options of the decoder, checked against each other when they are set."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from attrs import Attribute, frozen
from attrs.validators import in_, instance_of, optional

from arb_ternary.config.fields import without_effect
from arb_ternary.config.options import Rule, option, positive
from arb_ternary.optim.protocol import Planned
from arb_ternary.specs import TrainedPart

__all__ = ["FLOAT_PARTS", "DecoderConfig", "FloatPart"]

FloatPart = Literal["embedding", "head", "norms", "linears"]

#: The parts of a decoder that ``float_parts`` can name; all of them together make the float baseline.
FLOAT_PARTS: tuple[FloatPart, ...] = ("embedding", "head", "norms", "linears")

#: Largest distance of a constant power-of-two factor from 1: beyond it float16 activations overflow or vanish.
MAX_SCALE_EXPONENT = 16

#: More experts than any model has; a bound against a mistyped number that would allocate for minutes.
MAX_EXPERTS = 4096


def _whole(low: int, high: int | None = None) -> Rule:
    text = f"a whole number of at least {low}" if high is None else f"a whole number from {low} to {high}"
    schema = {"minimum": low} if high is None else {"minimum": low, "maximum": high}
    return Rule(text, lambda value: type(value) is int and low <= value and (high is None or value <= high), schema)


_count = _whole(1)
_scale_exponent = _whole(-MAX_SCALE_EXPONENT, MAX_SCALE_EXPONENT)


def _known_parts(_instance: object, attribute: Attribute[tuple[FloatPart, ...]], value: tuple[FloatPart, ...]) -> None:
    for part in value:
        if part not in FLOAT_PARTS:
            raise ValueError(f"{attribute.name!r} names the unknown part {part!r}; parts are {', '.join(FLOAT_PARTS)}")
    if len(set(value)) != len(value):
        raise ValueError(f"{attribute.name!r} names a part twice: {', '.join(value)}")


@frozen(kw_only=True)
class DecoderConfig:
    """A decoder-only transformer; the vocabulary comes from the data.

    The default is pure: every weight is ternary, no parameter and no buffer is float. Each linear reads an
    RMS-normalised input (BitNet). ``float_parts`` swaps parts for their float32 counterparts; with all four the same
    architecture is the float baseline.
    """

    width: int = option(256, "features of the residual stream", validator=_count)
    layers: int = option(4, "number of blocks", validator=_count)
    heads: int = option(4, "query heads", validator=_count)
    kv_heads: int | None = option(
        None,
        "key and value heads, each shared by heads / kv_heads query heads; null = heads",
        validator=optional(_count),
    )
    head_dim: int | None = option(None, "features of a head, even; null = width / heads", validator=optional(_count))
    feed_forward: int | None = option(
        None,
        "hidden features of a feed-forward layer; null = 4 width for relu2, 8/3 width rounded up to 32 for swiglu",
        validator=optional(_count),
    )
    activation: Literal["relu2", "swiglu"] = option(
        "relu2", "feed-forward non-linearity: relu(up)^2, or silu(gate) * up", validator=in_(("relu2", "swiglu"))
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
    max_length: int = option(512, "context: longest sequence, in tokens", validator=_count)
    sliding_window: int | None = option(
        None,
        "positions that a position sees, itself included; sequences may then be longer than max_length; null = all",
        validator=optional(_count),
    )
    experts: int = option(0, "experts of each feed-forward layer; 0 = dense", validator=_whole(0, MAX_EXPERTS))
    experts_per_token: int = option(2, "experts that a token is routed to in one pass", validator=_count)
    max_moe_iters: int = option(
        1,
        "most passes through the experts: a token is routed again, from its refined state, until its choice repeats",
        validator=_count,
    )
    tie_embeddings: bool = option(False, "the head uses the embedding's weights", validator=instance_of(bool))
    group_size: Literal[32, 64, 128, 256, "row"] = option(
        128, "weights of a row that share an exponent in linears and head", validator=in_((32, 64, 128, 256, "row"))
    )
    activations: Literal["int8", "float"] = option(
        "int8",
        "precision of what enters each linear: int8 with one scale a token, or float",
        validator=in_(("int8", "float")),
    )
    gradients: Literal["float", "int8"] = option(
        "float", "precision of the gradients that ternary modules multiply with", validator=in_(("float", "int8"))
    )
    float_parts: tuple[FloatPart, ...] = option(
        (),
        "parts kept in float32: embedding, head, norms (learned float gains), linears; empty = pure ternary",
        validator=_known_parts,
        converter=tuple,
    )
    learned_norms: bool = option(
        False,
        "pre-norms and final norm have a learned gain, ternary unless float_parts names norms",
        validator=instance_of(bool),
    )
    sub_norms: bool = option(
        True,
        "normalise also what enters the output and down projections; false = as in Llama",
        validator=instance_of(bool),
    )
    query_key_norm: bool = option(False, "normalise each head's queries and keys", validator=instance_of(bool))
    norm_eps: float = option(1e-6, "added to the mean square in every norm", validator=positive)
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
        "how the exponents of a ternary embedding move: by votes, not at all, or by the gradient's correlation",
        validator=in_(("residual", "frozen", "correlation")),
    )
    residual_scale: int = option(
        0, "each block adds 2^residual_scale times its update to the stream", validator=_scale_exponent
    )
    logit_scale: int = option(0, "logits are 2^logit_scale times the head's output", validator=_scale_exponent)
    zero_residual: bool = option(
        False,
        "blocks start as the identity: output and down projections are zero at birth",
        validator=instance_of(bool),
    )

    def __attrs_post_init__(self) -> None:
        if self.head_dim is None and self.width % self.heads:
            raise ValueError(
                f"'width' must be a multiple of 'heads' (or give head_dim); {self.heads} does not divide {self.width}"
            )
        if self.key_features % 2:
            raise ValueError(f"'head_dim' must be even for the rotary embedding; it is {self.key_features}")
        if self.heads % self.key_heads:
            raise ValueError(f"'kv_heads' must divide 'heads'; {self.key_heads} does not divide {self.heads}")
        if self.experts == 0 and (self.experts_per_token, self.max_moe_iters) != (2, 1):
            raise ValueError(
                "'experts' must be at least 1 for 'experts_per_token' and 'max_moe_iters' to have an effect; it is 0"
            )
        if 0 < self.experts < self.experts_per_token:
            raise ValueError(
                f"'experts_per_token' must be at most 'experts'; {self.experts_per_token} is more than {self.experts}"
            )
        if self.sliding_window is not None and not self.causal:
            raise ValueError("'sliding_window' needs 'causal': true")
        if self.sliding_window is not None and self.sliding_window > self.max_length:
            raise ValueError(
                f"'sliding_window' must be at most 'max_length'; {self.sliding_window} is more than {self.max_length}"
            )
        if self.tie_embeddings and ("embedding" in self.float_parts) != ("head" in self.float_parts):
            raise ValueError("'tie_embeddings' needs embedding and head both in 'float_parts' or both out of it")
        if self.tie_embeddings and self.embedding_scale_rule == "correlation":
            raise ValueError(
                "'embedding_scale_rule': correlation scales lookups only; a tied head would see other weights"
            )
        linears_are_float = {"head", "linears"} <= set(self.float_parts) and not self._ternary_gains
        if linears_are_float and "embedding" in self.float_parts:
            if self.gradients == "int8":
                raise ValueError(
                    "'gradients': int8 has no effect when embedding, head and linears are all in 'float_parts'"
                )
            if self.vote_bits != 8:
                raise ValueError("'vote_bits' has no effect when embedding, head and linears are all in 'float_parts'")
        if linears_are_float and self.scale_rule != "residual":
            raise ValueError("'scale_rule' has no effect when head and linears are in 'float_parts'")
        if self.embedding_scale_rule != "residual" and "embedding" in self.float_parts:
            raise ValueError("'embedding_scale_rule' has no effect when 'float_parts' names embedding")

    def planned(self) -> Planned:
        """What an optimizer will find in the decoder."""
        embedding, gains = "embedding" not in self.float_parts, self._ternary_gains
        whole = self.activations == "int8"  # then the gradient of a linear can be an integer too
        there: dict[TrainedPart, bool] = {
            "ternary": embedding or gains or self.ternary_linears,
            "float": bool(self.float_parts),
        }
        return Planned(
            kinds=frozenset(kind for kind in there if there[kind]),
            matrices=bool({"embedding", "head", "linears"} & set(self.float_parts)),
            vote_bits=self.vote_bits,
            integers=self.gradients == "int8" and (embedding or gains or (whole and self.ternary_linears)),
            exponents=(embedding and self.embedding_scale_rule == "residual")
            or (self.scale_rule == "residual" and (gains or self.ternary_linears)),
        )

    def contradictions_in(self, run: Any, planned: Planned | None) -> Iterator[tuple[str, str]]:
        """See ``arb_ternary.optim.protocol.Planned``."""
        if "norms" in self.float_parts:
            yield from without_effect(self, "norms among the 'float_parts' have gains anyway", "learned_norms")
        # A phase that changes the model may put ternary linears where there were none.
        changed = any(hasattr(phase.options, "planned_in") for phase in run.phases)
        added = changed and planned is not None and "ternary" in planned.kinds | planned.idle
        if not (self.ternary_linears or added):
            yield from without_effect(self, "no linear learns by votes", "group_size")

    @property
    def ternary_linears(self) -> bool:
        """Whether a linear of the blocks, or a head of its own, is ternary."""
        return not {"linears", "head"} <= set(self.float_parts) and not (
            self.tie_embeddings and "linears" in self.float_parts
        )

    @property
    def _ternary_gains(self) -> bool:
        return self.learned_norms and "norms" not in self.float_parts

    @property
    def key_heads(self) -> int:
        """Key and value heads."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def key_features(self) -> int:
        """Features of one head."""
        return self.width // self.heads if self.head_dim is None else self.head_dim

    @property
    def hidden(self) -> int:
        """Hidden features of a feed-forward layer."""
        if self.feed_forward is not None:
            return self.feed_forward
        # Three matrices of 8/3 width hold as many weights as two of 4 width (Shazeer, GLU Variants, 2020).
        return 4 * self.width if self.activation == "relu2" else -(-8 * self.width // 96) * 32

    @property
    def pure(self) -> bool:
        """Whether no part is float."""
        return not self.float_parts
