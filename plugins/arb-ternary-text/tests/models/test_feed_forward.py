from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_text.models.feed_forward import FeedForward

Configs = Callable[..., DecoderConfig]


def normed(x: np.ndarray) -> np.ndarray:
    return np.asarray(x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6))


def test_relu2_equals_its_formula(float_config: Configs) -> None:
    layer = FeedForward(float_config(float_parts=("linears",))).double()
    x = torch.randn(2, 3, 16, dtype=torch.float64)
    up = layer.up.weight.detach().numpy()
    down = layer.down.weight.detach().numpy()
    hidden = np.maximum(normed(x.numpy()) @ up.T, 0) ** 2
    np.testing.assert_allclose(layer(x).detach().numpy(), normed(hidden) @ down.T, atol=1e-13)


def test_swiglu_equals_its_formula(float_config: Configs) -> None:
    layer = FeedForward(float_config(activation="swiglu", sub_norms=False)).double()
    torch.nn.init.uniform_(layer.norm.weight, 0.5, 2.0)
    x = torch.randn(2, 3, 16, dtype=torch.float64)
    gate, up, down = (part.weight.detach().numpy() for part in (layer.gate, layer.up, layer.down))
    inside = normed(x.numpy()) * layer.norm.weight.detach().numpy()
    pre = inside @ gate.T
    hidden = pre / (1 + np.exp(-pre)) * (inside @ up.T)
    np.testing.assert_allclose(layer(x).detach().numpy(), hidden @ down.T, atol=1e-13)


def test_reglu2_equals_its_formula(float_config: Configs) -> None:
    layer = FeedForward(float_config(activation="reglu2", float_parts=("linears",))).double()
    x = torch.randn(2, 3, 16, dtype=torch.float64)
    gate, up, down = (part.weight.detach().numpy() for part in (layer.gate, layer.up, layer.down))
    inside = normed(x.numpy())
    hidden = np.maximum(inside @ gate.T, 0) ** 2 * (inside @ up.T)
    np.testing.assert_allclose(layer(x).detach().numpy(), normed(hidden) @ down.T, atol=1e-13)


def test_norms_without_a_gain_hold_nothing(float_config: Configs) -> None:
    layer = FeedForward(float_config(float_parts=("linears",)))
    assert {name for name, _ in layer.named_parameters()} == {"up.weight", "down.weight"}
    assert not list(layer.buffers())
