from __future__ import annotations

from typing import Any

import pytest

from arb_ternary.ternary.embedding import TernaryRMSNorm
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_text.models.decoder import Decoder


def test_the_default_decoder_has_no_float_part() -> None:
    assert DecoderConfig().pure
    assert not DecoderConfig(float_parts=["head"]).pure


@pytest.mark.parametrize(
    ("activation", "width", "hidden"),
    [("relu2", 48, 192), ("swiglu", 48, 128), ("swiglu", 96, 256), ("swiglu", 50, 160)],
)
def test_the_hidden_width_follows_the_rule_of_its_activation(
    activation: str, width: int, hidden: int
) -> None:
    config = DecoderConfig(width=width, heads=1, head_dim=16, activation=activation)
    assert config.hidden == hidden


def test_heads_share_the_width_unless_their_size_is_given() -> None:
    assert DecoderConfig(width=96, heads=6).key_features == 16
    assert DecoderConfig(width=96, heads=6, head_dim=32).key_features == 32
    assert DecoderConfig(heads=4).key_heads == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"width": 0}, "width"),
        ({"width": 30, "heads": 4}, "4 does not divide 30"),
        ({"width": 12, "heads": 4}, "must be even"),
        ({"heads": 4, "kv_heads": 3}, "3 does not divide 4"),
        ({"experts_per_token": 1}, "no effect because 'experts' is 0"),
        ({"max_moe_iters": 3}, "no effect because 'experts' is 0"),
        ({"experts": 2, "experts_per_token": 3}, "3 is more than 2"),
        ({"sliding_window": 64, "max_length": 32}, "64 is more than 32"),
        ({"sliding_window": 4, "causal": False}, "needs 'causal'"),
        ({"tie_embeddings": True, "float_parts": ["head"]}, "embedding and head both"),
        ({"tie_embeddings": True, "embedding_scale_rule": "correlation"}, "tied head"),
        ({"tie_embeddings": True, "zero_head": True}, "'zero_head' would make the embedding zero"),
        (
            {"architecture": "bitnet", "zero_head": True},
            "'zero_head' would make the embedding zero",
        ),
        ({"float_parts": ["haed"]}, "unknown part 'haed'"),
        ({"float_parts": ["head", "head"]}, "twice"),
        ({"float_parts": ["embedding", "head", "linears"], "gradients": "int8"}, "no effect"),
        ({"float_parts": ["embedding", "head", "linears"], "vote_bits": 4}, "no effect"),
        ({"vote_bits": 3}, "vote_bits"),
        ({"float_parts": ["embedding"], "embedding_scale_rule": "frozen"}, "no effect"),
        ({"activation": "gelu"}, "activation"),
        ({"group_size": 100}, "group_size"),
        ({"logit_scale": 17}, "logit_scale"),
        ({"norm_eps": 0.0}, "norm_eps"),
        ({"rotary_base": 1.0}, "rotary_base"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    options: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        DecoderConfig(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "option", [{"gradients": "int8"}, {"vote_bits": 4}, {"scale_rule": "frozen"}]
)
def test_options_of_ternary_modules_apply_to_gains(option: dict[str, Any]) -> None:
    config = DecoderConfig(
        width=32,
        layers=1,
        heads=2,
        learned_norms=True,
        float_parts=("embedding", "head", "linears"),
        **option,
    )
    gains = [
        module for module in Decoder(config, 16).modules() if isinstance(module, TernaryRMSNorm)
    ]
    assert gains
    ((name, value),) = option.items()
    assert {getattr(gain.shape if name == "vote_bits" else gain, name) for gain in gains} == {value}
