"""One transformer block: attention, then a feed-forward layer or experts, each added to the
residual stream.
"""

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


class Block(nn.Module):
    """``x + c attention(x)``, then ``x + c feed_forward(x)``, with ``c = 2**residual_scale``.

    A block knows nothing of its place in a model, so that blocks can be moved, prepended and
    frozen. The pre-norms belong to the two layers: each maps the raw residual stream to its update.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.residual_scale = 2.0**config.residual_scale
        decoupled = config.attention == "decoupled"
        self.attention: Attention | DecoupledAttention = (
            DecoupledAttention if decoupled else Attention
        )(config)
        self.feed_forward: FeedForward | Experts = (
            Experts(config) if config.experts else FeedForward(config)
        )
        if config.zero_residual:
            self.zero_residual_()

    def forward(
        self, x_BSD: Tensor, positions: Positions, cache: LayerCache | None = None
    ) -> Tensor:
        """The residual stream after the block."""
        x_BSD = torch.add(x_BSD, self.attention(x_BSD, positions, cache), alpha=self.residual_scale)
        return torch.add(x_BSD, self.feed_forward(x_BSD), alpha=self.residual_scale)

    def zero_residual_(self) -> None:
        """Make the block the identity: every linear that writes to the residual stream becomes
        zero.

        Those linears still get a gradient, from which they leave zero.
        """
        for projection in (
            *self.attention.output_projections(),
            *self.feed_forward.output_projections(),
        ):
            make_zero(projection)
