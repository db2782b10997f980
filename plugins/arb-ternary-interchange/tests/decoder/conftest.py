"""A reference decoder in plain torch that computes with dense weights, as other programs do."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from arb_ternary_text.models.config import DecoderConfig

Restated = Callable[[Mapping[str, Tensor], DecoderConfig, Tensor], Tensor]


@pytest.fixture(scope="session")
def restated() -> Restated:
    """Return the function ``restated(weights, config, ids)``, which computes logits from float64
    weights by path.
    """
    return _restated


def _restated(weights: Mapping[str, Tensor], config: DecoderConfig, ids: Tensor) -> Tensor:
    """Compute a decoder as other programs do: no scale in front of updates or logits, one eps."""

    def norm(x: Tensor, gain: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + config.norm_eps) * gain

    def rotate(x: Tensor) -> Tensor:
        factors = torch.tensor(config.rotary_factors or [1.0] * (size // 2), dtype=torch.float64)
        speed = (
            config.rotary_base ** (-torch.arange(0, size, 2, dtype=torch.float64) / size) / factors
        )
        angle = (torch.arange(ids.shape[1]) / config.rotary_scaling)[:, None] * speed
        a = x[..., : size // 2]
        b = x[..., size // 2 :]
        return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)

    size = config.key_features
    x = weights["embedding"][ids]
    for number in range(config.layers):
        part = {
            key.removeprefix(f"blocks.{number}."): w
            for key, w in weights.items()
            if key.startswith(f"blocks.{number}.")
        }
        normed = norm(x, part["attention.norm"])
        heads = []
        for name in ("query", "key", "value"):
            y = normed @ part[f"attention.{name}"].T + part.get(
                f"attention.biases.{name}", torch.zeros(())
            )
            y = y.unflatten(-1, (-1, size)).transpose(1, 2)
            if f"attention.{name}_norm" in part:
                y = norm(y, part[f"attention.{name}_norm"])
            y = y if name == "value" else rotate(y)
            heads.append(y.repeat_interleave(config.heads // y.shape[1], dim=1))
        seen = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        if "attention.output_norm" in part:
            seen = norm(seen, part["attention.output_norm"])
        x = x + seen @ part["attention.output"].T
        normed = norm(x, part["feed_forward.norm"])
        up = normed @ part["feed_forward.up"].T
        if config.feed_forward_activation == "relu2":
            hidden = up.relu().square()
        else:
            gate = normed @ part["feed_forward.gate"].T
            hidden = up * (
                F.silu(gate) if config.feed_forward_activation == "swiglu" else gate.relu().square()
            )
        if "feed_forward.hidden_norm" in part:
            hidden = norm(hidden, part["feed_forward.hidden_norm"])
        x = x + hidden @ part["feed_forward.down"].T
    return norm(x, weights["final_norm"]) @ weights.get("head", weights["embedding"]).T
