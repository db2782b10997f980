"""A transformer block: attention, then a feed-forward layer or experts."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from arb_ternary_text.models.attention import Attention, Positions
from arb_ternary_text.models.cache import LayerCache
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_text.models.decoupled_attention import DecoupledAttention
from arb_ternary_text.models.experts import Experts
from arb_ternary_text.models.feed_forward import FeedForward
from arb_ternary_text.models.parts import make_zero
from arb_ternary_text.models.trit_vector import vectors_together


class Block(nn.Module):
    """``x + c attention(x)``, then ``x + c feed_forward(x)``, with ``c = 2**residual_scale``.

    A block knows nothing of its place in a model, so that blocks can be moved, prepended and
    frozen. The pre-norms belong to the two layers: each maps the residual stream to its update.
    """

    attention: Attention | DecoupledAttention
    feed_forward: FeedForward | Experts

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.residual_scale = 2.0**config.residual_scale
        if config.attention == "decoupled":
            self.attention = DecoupledAttention(config)
        else:
            self.attention = Attention(config)
        self.feed_forward = Experts(config) if config.experts else FeedForward(config)
        if config.zero_residual:
            self.zero_residual_()

    def forward(
        self, x_BSD: Tensor, positions: Positions, cache: LayerCache | None = None
    ) -> Tensor:
        """Return the residual stream after the block."""
        scale = self.residual_scale
        with vectors_together(self):
            x_BSD = torch.add(x_BSD, self.attention(x_BSD, positions, cache), alpha=scale)
            return torch.add(x_BSD, self.feed_forward(x_BSD), alpha=scale)

    def zero_residual_(self) -> None:
        """Make the block the identity: set all linears that write to the residual stream to zero.

        They still get a gradient, from which they leave zero.
        """
        projections = self.attention.output_projections() + self.feed_forward.output_projections()
        for projection in projections:
            make_zero(projection)
