from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_text.models.parts import (
    FloatLinear,
    make_embedding,
    make_head,
    make_linear,
    make_norm,
)

Configs = Callable[..., DecoderConfig]


def test_int8_activations_round_each_token_of_a_float_linear() -> None:
    layer = FloatLinear(6, 3, activations="int8").double()
    x = torch.tensor(
        [[1.0, -0.3, 0.02, 127.0, 2.5, -0.5], [0.0] * 6, [3e-9, -1e-9, 0, 0, 0, 2e-9]],
        dtype=torch.float64,
    )
    scale = np.abs(x.numpy()).max(-1, keepdims=True) / 127
    rounded = np.rint(x.numpy() / np.where(scale == 0, 1, scale)) * scale
    np.testing.assert_allclose(
        layer(x).detach().numpy(), rounded @ layer.weight.detach().numpy().T, rtol=1e-14, atol=1e-14
    )
    # The halves went to the even neighbour: 2.5 to 2, -0.5 to 0.
    np.testing.assert_array_equal(rounded[0], [1, 0, 0, 127, 2, 0])


def test_the_gradient_passes_straight_through_the_rounding() -> None:
    layer = FloatLinear(6, 3, activations="int8").double()
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, layer.weight.sum(0).expand(4, 6), rtol=1e-15, atol=0)


def test_float_parts_keep_the_variance_of_their_input(float_config: Configs) -> None:
    config = float_config(width=256)
    linear = make_linear(config, 256, 512).weight
    embedding = make_embedding(config, 512)
    # The deviation of n normal samples has a standard error of sigma / sqrt(2 n); five of them.
    for weight, expected in ((linear, 1 / 16), (embedding.weight, 1.0)):
        assert (
            abs(float(weight.detach().std()) - expected)
            < 5 * expected / (2 * weight.numel()) ** 0.5
        )


def test_a_tied_head_multiplies_by_the_embedding(
    float_config: Configs,
) -> None:
    config = float_config(tie_embeddings=True)
    embedding = make_embedding(config, 7)
    head = make_head(config, 7, embedding)
    assert not list(head.parameters())
    x = torch.randn(2, 16)
    assert torch.equal(head(x), x @ embedding.weight.T)


def test_a_norm_has_a_gain_only_on_request(float_config: Configs) -> None:
    assert not list(make_norm(float_config(), 8, gain=False).parameters())
    assert not list(make_norm(float_config(float_parts=("linears",)), 8, gain=True).parameters())
    assert [tuple(gain.shape) for gain in make_norm(float_config(), 8, gain=True).parameters()] == [
        (8,)
    ]
