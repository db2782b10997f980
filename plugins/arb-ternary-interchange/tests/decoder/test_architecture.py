"""The architecture of a decoder in other programs, and the error for a decoder of none."""

from __future__ import annotations

from typing import Any

import pytest

from arb_ternary.errors import ConfigError
from arb_ternary_interchange.decoder.architecture import architecture_of
from arb_ternary_interchange.decoder.weights import exported_weights
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_text.models.decoder import Decoder

SMALL: dict[str, Any] = {"width": 32, "layers": 1, "heads": 4, "max_length": 8}


@pytest.mark.parametrize("name", ["llama", "qwen3", "arcee", "bitnet"])
def test_a_preset_is_its_own_architecture_as_are_its_options(name: str) -> None:
    config = DecoderConfig(**SMALL, architecture=name)  # type: ignore[arg-type]
    assert architecture_of(config) == name
    same = {
        "activation": config.feed_forward_activation,
        "sub_norms": config.has_sub_norms,
        "query_key_norm": config.has_query_key_norm,
        "tie_embeddings": config.tied,
    }
    assert architecture_of(DecoderConfig(**SMALL, **same)) == name


@pytest.mark.parametrize(
    ("options", "names", "nearest"),
    [
        ({}, "sub_norms: true", "arcee"),
        ({"activation": "swiglu", "query_key_norm": True}, "sub_norms: true", "qwen3"),
        ({"sub_norms": False, "experts": 2}, "experts: 2", "arcee"),
        ({"sub_norms": False, "sliding_window": 4}, "sliding_window: 4", "arcee"),
        ({"sub_norms": False, "causal": False}, "causal: false", "arcee"),
        (
            {"sub_norms": False, "embedding_scale_rule": "correlation"},
            "embedding_scale_rule: correlation",
            "arcee",
        ),
        ({"activation": "reglu2", "tie_embeddings": True}, "activation: reglu2", "bitnet"),
    ],
)
def test_a_decoder_of_no_architecture_is_refused(
    options: dict[str, Any], names: str, nearest: str
) -> None:
    with pytest.raises(ConfigError) as error:
        architecture_of(DecoderConfig(**{**SMALL, **options}))
    assert names in error.value.what
    assert f"`architecture: {nearest}`" in error.value.hint


def test_reglu2_is_an_architecture_where_the_format_computes_it() -> None:
    config = DecoderConfig(**SMALL, activation="reglu2", tie_embeddings=True)
    assert architecture_of(config, reglu2=True) == "bitnet"


def test_decoupled_attention_is_refused_with_the_nearest_preset() -> None:
    config = DecoderConfig(
        width=32,
        layers=1,
        heads=4,
        activation="swiglu",
        sub_norms=False,
        attention="decoupled",
        sem_dim=4,
        geo_dim=4,
    )
    with pytest.raises(ConfigError, match="attention: decoupled") as error:
        architecture_of(config)
    assert "`architecture: llama`, with attention: standard" in error.value.hint
    assert "safetensors" in error.value.hint
    with pytest.raises(ConfigError, match="block 0 has decoupled attention") as error:
        list(exported_weights(Decoder(config, 16)))
    assert "`attention: standard`" in error.value.hint
