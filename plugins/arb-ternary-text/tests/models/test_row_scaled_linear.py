"""A ternary linear whose rows have float factors that learn."""

from __future__ import annotations

import pytest
import torch

from arb_ternary.ternary.linear import TernaryLinear
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_text.models.decoder import Decoder
from arb_ternary_text.models.scaled_linear import ScaledTernaryLinear

#: 0.3 and 0.1 are no numbers of float16: what multiplies is the nearest of them.
FACTORS = torch.tensor([0.3, -1.5, 0.1, 0.0, 2.25])


def pair() -> tuple[ScaledTernaryLinear, TernaryLinear]:
    torch.manual_seed(3)
    scaled = ScaledTernaryLinear(64, 5, factors="rows", group_size=32, activations="float")
    plain = TernaryLinear(64, 5, group_size=32, activations="float")
    plain.set_trits(scaled.trits(), scaled.exponent)
    return scaled, plain


def test_factors_are_1_at_birth() -> None:
    scaled, plain = pair()
    x = torch.randn(3, 64)
    assert torch.equal(scaled(x), plain(x))


def test_rows_are_multiplied_and_factors_and_votes_have_their_gradients() -> None:
    scaled, plain = pair()
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


def test_under_autocast_the_output_has_its_dtype_and_the_factors_keep_theirs() -> None:
    scaled, _ = pair()
    with torch.autocast("cpu", torch.bfloat16):
        y = scaled(torch.randn(2, 64))
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert scaled.row_scale.grad is not None
    assert scaled.row_scale.grad.dtype == torch.float32


def test_every_ternary_linear_of_a_decoder_has_them_and_no_other() -> None:
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
