"""Checks of the decoder's options against each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from arb_ternary.config.fields import unused_options
from arb_ternary_text.models.architectures import departures, nearest_preset

if TYPE_CHECKING:
    from arb_ternary_text.models.config import DecoderConfig


def check_options(config: DecoderConfig) -> None:
    """Check options that are valid one by one.

    Raises:
        ValueError: two options contradict each other, or one has no effect. The message names them
            and says what would work.
    """
    for name, message in unused_options(config):
        raise ValueError(f"'{name}' {message}")
    _check_attention(config)
    _check_shapes(config)
    _check_architecture(config)
    _check_parts(config)


def _check_attention(config: DecoderConfig) -> None:
    if config.attention == "standard":
        return
    if config.sem_dim is None:
        raise ValueError("'attention': decoupled needs 'sem_dim'")
    if config.geo_dim is None:
        raise ValueError("'attention': decoupled needs 'geo_dim'")
    for name in ("geo_dim", "rotary_dim"):
        value = getattr(config, name)
        if value is not None and value % 2:
            raise ValueError(
                f"'{name}' must be even for the rotary embedding, for example {value + 1}; it is "
                f"{value}"
            )
    if config.rotary_dim is not None and config.rotary_dim < config.geo_dim:
        raise ValueError(
            "'rotary_dim' must be at least 'geo_dim', because each pair of features turns with a "
            f"plane of its own; {config.rotary_dim} is less than {config.geo_dim}"
        )
    if config.tie_query_key and config.key_heads != config.heads:
        raise ValueError(
            f"'tie_query_key' needs as many 'kv_heads' as 'heads', {config.heads}; there are "
            f"{config.key_heads}"
        )
    if config.has_query_key_norm:
        raise ValueError(
            "'query_key_norm' would undo the factors of the two parts of decoupled attention; "
            "remove it, or use 'attention': standard"
        )


def _check_shapes(config: DecoderConfig) -> None:
    standard = config.attention == "standard"
    if config.head_dim is None and config.width % config.heads:
        raise ValueError(
            f"'width' must be a multiple of 'heads' unless 'head_dim' is given; {config.heads} "
            f"does not divide {config.width}"
        )
    if standard and config.value_features % 2:
        raise ValueError(
            f"'head_dim' must be even for the rotary embedding; it is {config.value_features}"
        )
    if config.heads % config.key_heads:
        raise ValueError(
            f"'kv_heads' must divide 'heads'; {config.key_heads} does not divide {config.heads}"
        )
    planes = config.rotary_features // 2
    if config.rotary_factors is not None and len(config.rotary_factors) != planes:
        name = "head_dim" if standard else "rotary_dim"
        raise ValueError(
            f"'rotary_factors' must be {name} / 2 = {planes} numbers, one per plane of a head; "
            f"there are {len(config.rotary_factors)}"
        )
    if 0 < config.experts < config.experts_per_token:
        raise ValueError(
            f"'experts_per_token' must be at most 'experts'; {config.experts_per_token} is more "
            f"than {config.experts}"
        )
    if config.sliding_window is None:
        return
    if not config.causal:
        raise ValueError("'sliding_window' needs 'causal': true")
    if config.sliding_window > config.max_length:
        raise ValueError(
            f"'sliding_window' must be at most 'max_length'; {config.sliding_window} is more than "
            f"{config.max_length}"
        )


def _check_architecture(config: DecoderConfig) -> None:
    if config.architecture is None:
        return
    for name, wanted in departures(config, config.architecture):
        nearest, others = nearest_preset(config, having=name)
        remedy = "remove 'architecture': no preset has it"
        if nearest is not None:
            options = [("architecture", nearest), *others]
            remedy = "use " + " and ".join(f"'{option}': {value}" for option, value in options)
        raise ValueError(
            f"'{name}' is {wanted} in 'architecture': {config.architecture}; remove it, or {remedy}"
        )


def _check_parts(config: DecoderConfig) -> None:
    if config.tied and ("embedding" in config.float_parts) != ("head" in config.float_parts):
        raise ValueError(
            "'tie_embeddings' needs embedding and head both in 'float_parts' or both out of it"
        )
    if config.tied and config.zero_head:
        raise ValueError(
            "'zero_head' would make the embedding zero, whose weights a tied head uses; remove one "
            "of them"
        )
    if config.tied and config.embedding_scale_rule == "correlation":
        raise ValueError(
            "'embedding_scale_rule': correlation scales lookups only; a tied head would see other "
            "weights"
        )
    if config.group_size == "tensor" and config.scale_rule != "frozen":
        raise ValueError(
            "'group_size': tensor needs 'scale_rule': frozen, because votes would move the "
            "exponents of a matrix apart"
        )
    if config.row_scales and config.linear_scales:
        raise ValueError(
            "'row_scales' and 'linear_scales' are factors of the same products; remove one of them"
        )
