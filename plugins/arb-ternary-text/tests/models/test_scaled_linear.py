"""Ternary linears with a constant factor, or with a learned factor per row."""

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
    # Votes are cast from the gradient of T 2^E, which contains the factor.
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


def test_inner_gains_are_ternary_like_the_pre_norms() -> None:
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


def test_one_exponent_per_matrix_is_stored_as_equal_ones() -> None:
    model = Decoder(DecoderConfig(**{**SMALL, "group_size": "tensor", "scale_rule": "frozen"}), 16)
    for module in model.modules():
        if isinstance(module, TernaryLinear):
            assert module.group_size == "row"
            assert len(module.exponent.unique()) == 1


# --- learned factors of rows

#: float16 cannot represent 0.3 and 0.1: the nearest numbers multiply.
FACTORS = torch.tensor([0.3, -1.5, 0.1, 0.0, 2.25])


def row_pair() -> tuple[ScaledTernaryLinear, TernaryLinear]:
    torch.manual_seed(3)
    scaled = ScaledTernaryLinear(64, 5, factors="rows", group_size=32, activations="float")
    plain = TernaryLinear(64, 5, group_size=32, activations="float")
    plain.set_trits(scaled.trits(), scaled.exponent)
    return scaled, plain


def test_factors_are_initially_1() -> None:
    scaled, plain = row_pair()
    x = torch.randn(3, 64)
    assert torch.equal(scaled(x), plain(x))


def test_factors_and_votes_have_their_gradients() -> None:
    scaled, plain = row_pair()
    with torch.no_grad():
        scaled.row_scale.copy_(FACTORS)
    x, other = (
        torch.randn(4, 64, generator=torch.Generator().manual_seed(1)).requires_grad_()
        for _ in range(2)
    )
    rounded = FACTORS.half().float()
    grad = torch.randn(4, 5, generator=torch.Generator().manual_seed(2))
    y = scaled(x)
    products = plain(other)
    torch.testing.assert_close(y, rounded * products, rtol=1e-6, atol=0)
    y.backward(grad)
    products.backward(rounded * grad)
    # d/ds_n of sum(g s y) = sum over rows of g y.
    torch.testing.assert_close(
        scaled.row_scale.grad, (grad * products).sum(dim=0), rtol=1e-5, atol=1e-6
    )
    torch.testing.assert_close(x.grad, other.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(scaled.stats, plain.stats, rtol=1e-5, atol=1e-6)
    assert torch.equal(scaled.votes, plain.votes)
    torch.testing.assert_close(scaled.dense_weight(), rounded.unsqueeze(1) * plain.dense_weight())


def test_factors_keep_their_dtype_under_autocast() -> None:
    scaled, _ = row_pair()
    with torch.autocast("cpu", torch.bfloat16):
        y = scaled(torch.randn(2, 64))
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert scaled.row_scale.grad is not None
    assert scaled.row_scale.grad.dtype == torch.float32


def test_every_ternary_linear_of_a_decoder_has_factors() -> None:
    model = Decoder(
        DecoderConfig(width=32, layers=2, heads=2, row_scales=True, float_parts=("head", "norms")),
        16,
    )
    kinds = {type(module) for module in model.modules() if isinstance(module, TernaryLinear)}
    assert kinds == {ScaledTernaryLinear}
    assert not any(isinstance(module, ScaledTernaryLinear) for module in model.head.modules())


def test_two_kinds_of_factors_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"'row_scales' and 'linear_scales' are factors of the same products"
    ):
        DecoderConfig(row_scales=True, linear_scales=True)
