"""A ternary linear with a float factor, and the float parts of the other options, in a run's
eyes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from arb_ternary.ternary.linear import TernaryLinear
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_text.models.decoder import Decoder
from arb_ternary_text.models.scaled_linear import ScaledTernaryLinear
from arb_ternary_train.audit import audit

SMALL: dict[str, Any] = {"width": 32, "layers": 1, "heads": 2, "max_length": 8, "group_size": 32}


def pair() -> tuple[ScaledTernaryLinear, TernaryLinear]:
    torch.manual_seed(3)
    scaled = ScaledTernaryLinear(64, 5, factors="constant", group_size=32, activations="float")
    plain = TernaryLinear(64, 5, group_size=32, activations="float")
    plain.set_trits(scaled.trits(), scaled.exponent)
    scaled.scale.fill_(0.3)
    return scaled, plain


def test_the_factor_multiplies_the_product_and_its_gradient() -> None:
    scaled, plain = pair()
    x, other = (torch.ones(2, 64).requires_grad_() for _ in range(2))
    y = scaled(x)
    torch.testing.assert_close(y, 0.3 * plain(other), rtol=1e-6, atol=0)
    y.backward(torch.ones(2, 5))
    plain(other).backward(torch.full((2, 5), 0.3))
    torch.testing.assert_close(x.grad, other.grad, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(scaled.dense_weight(), 0.3 * plain.dense_weight())
    # What votes are made of is the gradient of T 2^E, with the factor.
    torch.testing.assert_close(scaled.stats, plain.stats, rtol=1e-5, atol=0)


def test_the_factor_stays_float32_and_moves_with_the_module() -> None:
    scaled, _ = pair()
    scaled.to(torch.bfloat16)
    assert scaled.scale.dtype == torch.float32
    assert float(scaled.scale) == pytest.approx(0.3, rel=1e-7)
    x = torch.randn(2, 64, dtype=torch.bfloat16)
    assert scaled(x).dtype == torch.bfloat16
    assert scaled.to("meta").scale.is_meta


@pytest.mark.parametrize(
    ("options", "parameters", "buffers"),
    [
        ({}, 0, 0),
        ({"linear_scales": True}, 0, 7),
        ({"linear_scales": True, "architecture": "llama"}, 0, 8),
        ({"row_scales": True}, 4 * 32 + 128 + 32 + 16, 0),
        ({"row_scales": True, "float_parts": ("head",)}, 4 * 32 + 128 + 32 + 16 * 32, 0),
        ({"query_key_value_bias": True, "kv_heads": 1}, 32 + 16 + 16, 0),
        ({"stored_eps": True, "query_key_norm": True}, 0, 0),
        (
            {"inner_gains": True, "float_parts": ("norms",), "query_key_norm": True},
            3 * 32 + 32 + 128 + 2 * 16,
            0,
        ),
        ({"inner_gains": True, "learned_norms": True}, 0, 0),
    ],
)
def test_the_audit_counts_what_is_float(
    options: dict[str, Any], parameters: int, buffers: int
) -> None:
    config = DecoderConfig(**{**SMALL, **options})
    counted = audit(Decoder(config, 16))
    assert (counted.float_parameters, counted.float_buffers) == (parameters, buffers)
    assert counted.pure == config.pure
    assert ("float" in config.planned().kinds) == (parameters > 0)


def test_inner_gains_are_ternary_where_the_pre_norms_are() -> None:
    model = Decoder(
        DecoderConfig(**SMALL, learned_norms=True, inner_gains=True, query_key_norm=True), 16
    )
    kinds = {
        name.split(".")[-1]: type(module).__name__
        for name, module in model.named_modules()
        if "norm" in name
    }
    assert set(kinds) == {
        "norm",
        "output_norm",
        "hidden_norm",
        "query_norm",
        "key_norm",
        "final_norm",
    }
    assert set(kinds.values()) == {"TernaryRMSNorm"}


def test_one_exponent_a_matrix_is_held_as_equal_ones() -> None:
    model = Decoder(DecoderConfig(**{**SMALL, "group_size": "tensor", "scale_rule": "frozen"}), 16)
    for module in model.modules():
        if isinstance(module, TernaryLinear):
            assert module.group_size == "row"
            assert len(module.exponent.unique()) == 1
