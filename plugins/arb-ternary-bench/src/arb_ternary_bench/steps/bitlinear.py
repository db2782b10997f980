"""Quantisation-aware training of BitNet b1.58 as it is published, as a yardstick: float master
weights, eager torch.

Source: Microsoft, "The Era of 1-bit LLMs: Training Tips, Code and FAQ", 2024. Every pass makes the
weight ternary by its mean absolute value and each row of the input int8 by its largest; the
gradients of both roundings are those of the identity. The norm that the published layer starts with
is left to its surroundings, as in core's decoder.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class BitLinear(nn.Linear):
    """A linear without bias: ``x [..., K]`` to ``[..., N]``."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # nn.Linear's own name
        x = input
        w = self.weight
        x_quantised = x + (_int8_rows(x) - x).detach()
        w_quantised = w + (_ternary(w) - w).detach()
        return F.linear(x_quantised, w_quantised)


def _int8_rows(x: Tensor) -> Tensor:
    scale = 127.0 / x.abs().max(dim=-1, keepdim=True).values.clamp_(min=1e-5)
    return (x * scale).round().clamp_(-128, 127) / scale


def _ternary(w: Tensor) -> Tensor:
    scale = 1.0 / w.abs().mean().clamp_(min=1e-5)
    return (w * scale).round().clamp_(-1, 1) / scale
