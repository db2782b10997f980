"""A reference in plain torch computes with exported weights what the model computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from arb_ternary.errors import ConfigError
from arb_ternary.ternary.embedding import StoredEps
from arb_ternary_interchange.decoder.weights import TernaryWeight, exported_weights, weight_of
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_text.models.decoder import Decoder
from arb_ternary_text.models.scaled_linear import ScaledTernaryLinear
from arb_ternary_text.models.trit_vector import TritVector

Restated = Callable[[Mapping[str, Tensor], DecoderConfig, Tensor], Tensor]

VOCABULARY = 13
SMALL: dict[str, Any] = {
    "width": 32,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "max_length": 16,
    "activations": "float",
    "group_size": 32,
    "norm_eps": 1e-3,
}


def filled(**options: Any) -> Decoder:
    """Make a model in which every number differs from that of a new one."""
    model = Decoder(DecoderConfig(**{**SMALL, **options}), VOCABULARY)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
        for module in model.modules():
            if isinstance(module, TritVector):
                shape = (module.shape.out_features, module.shape.in_features)
                module.set_trits(torch.randint(-1, 2, shape, generator=generator).to(torch.int8))
            if isinstance(module, StoredEps) and module.stored_eps:
                module.eps = float(torch.rand((), generator=generator)) * 0.1
            if isinstance(module, ScaledTernaryLinear) and module.scale is not None:
                module.scale.fill_(0.5 + float(torch.rand((), generator=generator)))
    return model.eval()


@pytest.mark.parametrize(
    "options",
    [
        {"architecture": "llama", "residual_scale": -2, "logit_scale": 1, "learned_norms": True},
        {"architecture": "qwen3", "rotary_factors": (1.0, 2.0, 3.0, 8.0), "rotary_scaling": 4.0},
        {
            "architecture": "qwen3",
            "float_parts": ("norms",),
            "inner_gains": True,
            "query_key_value_bias": True,
        },
        {
            "architecture": "arcee",
            "linear_scales": True,
            "float_parts": ("linears",),
            "residual_scale": 1,
        },
        {
            "architecture": "bitnet",
            "activation": "reglu2",
            "float_parts": ("norms",),
            "inner_gains": True,
            "stored_eps": True,
            "linear_scales": True,
            "query_key_value_bias": True,
            "residual_scale": -1,
        },
        {
            "architecture": "bitnet",
            "stored_eps": True,
            "group_size": "tensor",
            "scale_rule": "frozen",
        },
        {"stored_eps": True, "float_parts": ("linears", "embedding", "head")},
        {"architecture": "llama", "row_scales": True, "residual_scale": -1},
        {"row_scales": True, "stored_eps": True, "float_parts": ("norms",), "inner_gains": True},
        {
            "row_scales": True,
            "vector_trits": 8,
            "stored_eps": True,
            "learned_norms": True,
            "inner_gains": True,
        },
        {"architecture": "qwen3", "row_scales": True, "vector_trits": 4, "float_parts": ("norms",)},
        {"architecture": "qwen3", "stored_eps": True, "query_key_value_bias": True},
    ],
)
def test_the_exported_weights_compute_the_logits_of_the_model(
    options: dict[str, Any], restated: Restated
) -> None:
    model = filled(**options)
    weights: dict[str, Tensor] = {}
    for name, weight in exported_weights(model):
        weights[name] = (weight.dense() if isinstance(weight, TernaryWeight) else weight).double()
    ids = torch.randint(0, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(2))
    expected = restated(weights, model.config, ids)
    # float32 through two blocks: a hundred roundings of 6e-8 of logits up to 20.
    torch.testing.assert_close(model(ids).double(), expected, rtol=1e-4, atol=1e-4)
    assert ("head" in weights) != model.config.tied


def test_scales_that_are_powers_of_two_go_into_the_exponents() -> None:
    plain, scaled = (
        Decoder(DecoderConfig(**SMALL, residual_scale=-scale), VOCABULARY) for scale in (0, 3)
    )
    scaled.load_state_dict(plain.state_dict())
    before, after = (dict(exported_weights(model)) for model in (plain, scaled))
    for name, weight in after.items():
        other = before[name]
        if not isinstance(weight, TernaryWeight) or not isinstance(other, TernaryWeight):
            continue
        moved = -3 if name.endswith((".output", ".down")) else 0
        assert torch.equal(weight.exponent, other.exponent + moved)
        assert torch.equal(weight.trits, other.trits)
        assert weight.scale == 1.0


def test_an_exponent_beyond_int8_stays_a_factor() -> None:
    model = Decoder(DecoderConfig(**SMALL, residual_scale=-8), VOCABULARY)
    (block, *_) = model.blocks
    output: Any = block.get_submodule("attention.output")
    output.set_trits(output.trits(), torch.full_like(output.exponent, -120))
    weight = dict(exported_weights(model))["blocks.0.attention.output"]
    assert isinstance(weight, TernaryWeight)
    assert (weight.exponent.unique().tolist(), weight.scale) == ([-120], 2.0**-8)


def test_modules_without_a_form_elsewhere_are_refused() -> None:
    with pytest.raises(ConfigError, match="a Conv1d has no form"):
        weight_of(torch.nn.Conv1d(2, 2, 1))
    with pytest.raises(ConfigError, match="block 0 is not a plain block"):
        list(exported_weights(Decoder(DecoderConfig(**SMALL, experts=2), VOCABULARY)))
