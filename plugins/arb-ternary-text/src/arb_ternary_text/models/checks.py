"""What the decoder's options ask of each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from arb_ternary_text.models.architectures import departures, nearest_preset

if TYPE_CHECKING:
    from arb_ternary_text.models.config import DecoderConfig

#: Options of decoupled attention alone.
_DECOUPLED: Final = (
    "sem_dim",
    "geo_dim",
    "rotary_dim",
    "attention_gate",
    "null_key_value",
    "tie_query_key",
)


def check_options(config: DecoderConfig) -> None:
    """Options that are right one by one and contradict each other.

    Raises:
        ValueError: two of them do; the message names them and what would do.
    """
    _check_attention(config)
    _check_shapes(config)
    _check_architecture(config)
    _check_parts(config)


def _check_attention(config: DecoderConfig) -> None:
    if config.attention == "standard":
        for name in _DECOUPLED:
            if getattr(config, name):
                raise ValueError(f"'{name}' has no effect without 'attention': decoupled")
        return
    for name, which in (("sem_dim", "without a position"), ("geo_dim", "with one")):
        if getattr(config, name) is None:
            raise ValueError(
                f"'attention': decoupled needs '{name}', the features of a head's keys {which}"
            )
    for name in ("geo_dim", "rotary_dim"):
        value = getattr(config, name)
        if value is not None and value % 2:
            raise ValueError(
                f"'{name}' must be even for the rotary embedding; it is {value}, and {value + 1} "
                f"would do"
            )
    if config.rotary_dim is not None and config.rotary_dim < (config.geo_dim or 0):
        raise ValueError(
            "'rotary_dim' must be at least 'geo_dim', for each pair of features turns with a plane "
            f"of its own; {config.rotary_dim} is less than {config.geo_dim}"
        )
    if config.tie_query_key and config.key_heads != config.heads:
        raise ValueError(
            f"'tie_query_key' needs as many 'kv_heads' as 'heads', {config.heads}; they are "
            f"{config.key_heads}"
        )


def _check_shapes(config: DecoderConfig) -> None:
    if config.head_dim is None and config.width % config.heads:
        raise ValueError(
            f"'width' must be a multiple of 'heads' (or give head_dim); {config.heads} does not "
            f"divide {config.width}"
        )
    if config.attention == "standard" and config.value_features % 2:
        raise ValueError(
            f"'head_dim' must be even for the rotary embedding; it is {config.value_features}"
        )
    if config.heads % config.key_heads:
        raise ValueError(
            f"'kv_heads' must divide 'heads'; {config.key_heads} does not divide {config.heads}"
        )
    planes = config.rotary_features // 2
    if config.rotary_factors is not None and len(config.rotary_factors) != planes:
        name = "head_dim" if config.attention == "standard" else "rotary_dim"
        raise ValueError(
            f"'rotary_factors' must be {name} / 2 = {planes} numbers, one for each plane of a "
            f"head; they are {len(config.rotary_factors)}"
        )
    if config.experts == 0 and (config.experts_per_token, config.max_moe_iters) != (2, 1):
        raise ValueError(
            "'experts' must be at least 1 for 'experts_per_token' and 'max_moe_iters' to have an "
            "effect; it is 0"
        )
    if 0 < config.experts < config.experts_per_token:
        raise ValueError(
            f"'experts_per_token' must be at most 'experts'; {config.experts_per_token} is more "
            f"than {config.experts}"
        )
    if config.sliding_window is not None and not config.causal:
        raise ValueError("'sliding_window' needs 'causal': true")
    if config.sliding_window is not None and config.sliding_window > config.max_length:
        raise ValueError(
            f"'sliding_window' must be at most 'max_length'; {config.sliding_window} is more than "
            f"{config.max_length}"
        )


def _check_architecture(config: DecoderConfig) -> None:
    if config.architecture is None:
        return
    for name, wanted in departures(config, config.architecture):
        nearest, further = nearest_preset(config, having=name)
        use = " and ".join(
            f"'{option}': {needed}" for option, needed in (("architecture", nearest), *further)
        )
        raise ValueError(
            f"'{name}' is {wanted} in 'architecture': {config.architecture}; leave it out, or "
            + (f"use {use}" if nearest else "leave 'architecture' out: none has it")
        )


def _check_parts(config: DecoderConfig) -> None:
    if config.attention == "decoupled" and config.has_query_key_norm:
        raise ValueError(
            "'query_key_norm' would undo the factors of decoupled attention's two parts; leave it "
            "out, or use 'attention': standard"
        )
    if config.tied and ("embedding" in config.float_parts) != ("head" in config.float_parts):
        raise ValueError(
            "'tie_embeddings' needs embedding and head both in 'float_parts' or both out of it"
        )
    if config.tied and config.zero_head:
        raise ValueError(
            "'zero_head' would make the embedding zero, whose weights a tied head uses; leave one "
            "of them out"
        )
    if config.tied and config.embedding_scale_rule == "correlation":
        raise ValueError(
            "'embedding_scale_rule': correlation scales lookups only; a tied head would see other "
            "weights"
        )
    if config.group_size == "tensor" and config.scale_rule != "frozen":
        raise ValueError(
            "'group_size': tensor needs 'scale_rule': frozen, for votes would move the exponents "
            "of a matrix apart"
        )
    if config.row_scales and config.linear_scales:
        raise ValueError(
            "'row_scales' and 'linear_scales' are factors of the same products; leave one of them "
            "out"
        )
    if config.vector_trits is not None and not (config.row_scales or config.ternary_gains):
        raise ValueError(
            "'vector_trits' needs 'row_scales', or 'learned_norms' without norms in 'float_parts'"
        )
    if config.inner_gains and not (config.learned_norms or "norms" in config.float_parts):
        raise ValueError("'inner_gains' needs 'learned_norms', or norms in 'float_parts'")
    if config.inner_gains and not (config.has_sub_norms or config.has_query_key_norm):
        raise ValueError("'inner_gains' has no effect without 'sub_norms' and 'query_key_norm'")
    if config.stored_eps and not (config.has_sub_norms or config.has_query_key_norm):
        raise ValueError("'stored_eps' has no effect without 'sub_norms' and 'query_key_norm'")
    linears_are_float = {"head", "linears"} <= set(config.float_parts) and not config.ternary_gains
    if linears_are_float and "embedding" in config.float_parts:
        if config.gradients == "int8":
            raise ValueError(
                "'gradients': int8 has no effect when embedding, head and linears are all in "
                "'float_parts'"
            )
        if config.vote_bits != 8:
            raise ValueError(
                "'vote_bits' has no effect when embedding, head and linears are all in "
                "'float_parts'"
            )
    if linears_are_float and config.scale_rule != "residual":
        raise ValueError("'scale_rule' has no effect when head and linears are in 'float_parts'")
    if config.embedding_scale_rule != "residual" and "embedding" in config.float_parts:
        raise ValueError("'embedding_scale_rule' has no effect when 'float_parts' names embedding")
