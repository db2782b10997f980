"""The dense feed-forward layer: ReLU^2 (So et al., Primer, 2021) or SwiGLU (Shazeer, 2020)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_text.models.parts import make_linear, make_norm

__all__ = ["FeedForward"]


class FeedForward(nn.Module):
    """``down(norm(act(up(norm(x)))))``, token by token.

    Args:
        config: the decoder's options.
        normalise_input: False inside an expert layer, which normalises once for its router and all experts.
    """

    def __init__(self, config: DecoderConfig, *, normalise_input: bool = True) -> None:
        super().__init__()
        self.norm = make_norm(config, config.width, gain=True) if normalise_input else nn.Identity()
        self.gate = make_linear(config, config.width, config.hidden) if config.activation == "swiglu" else None
        self.up = make_linear(config, config.width, config.hidden)
        self.hidden_norm = make_norm(config, config.hidden, gain=False) if config.sub_norms else nn.Identity()
        self.down = make_linear(config, config.hidden, config.width)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """The update that the residual stream ``x_BSD`` gets; any leading dimensions."""
        normed_BSD = self.norm(x_BSD)
        up_BSF = self.up(normed_BSD)
        hidden_BSF = F.relu(up_BSF).square() if self.gate is None else F.silu(self.gate(normed_BSD)) * up_BSF
        update_BSD: Tensor = self.down(self.hidden_norm(hidden_BSF))
        return update_BSD

    def output_projections(self) -> list[nn.Module]:
        """The linears that write to the residual stream."""
        return [self.down]
