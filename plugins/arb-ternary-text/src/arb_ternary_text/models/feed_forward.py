"""The dense feed-forward layer.

Its activations are ReLU^2 (So et al., Primer, 2021), SwiGLU (Shazeer, 2020) and ReLU^2 of a gate.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from arb_ternary_text.models import native_block
from arb_ternary_text.models.block_kernels import kernels_for
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_text.models.parts import make_linear, make_norm, make_sub_norm
from arb_ternary_text.models.shared_rows import multiply_all


class FeedForward(nn.Module):
    """``down(norm(act(up(norm(x)))))`` of each token.

    Args:
        config: the decoder's options.
        normalise_input: False inside an expert layer, which normalises once for its router and all
            experts.
    """

    def __init__(self, config: DecoderConfig, *, normalise_input: bool = True) -> None:
        super().__init__()
        self.norm = make_norm(config, config.width, gain=True) if normalise_input else nn.Identity()
        self.activation = config.feed_forward_activation
        self.gate = None
        if self.activation != "relu2":
            self.gate = make_linear(config, config.width, config.hidden)
        self.up = make_linear(config, config.width, config.hidden)
        self.hidden_norm = make_sub_norm(config, config.hidden)
        self.down = make_linear(config, config.hidden, config.width)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Return the update that the residual stream ``x_BSD`` gets; any leading dimensions."""
        linears = (self.up, self.down) if self.gate is None else (self.gate, self.up, self.down)
        kernels = kernels_for(x_BSD, (self.norm, self.hidden_norm), linears)
        if kernels is not None:
            return native_block.feed_forward(
                kernels, x_BSD, self.norm, linears, self.activation, self.hidden_norm
            )

        normed_BSD = self.norm(x_BSD)
        if self.gate is None:
            hidden_BSF = F.relu(self.up(normed_BSD)).square()
        else:
            up_BSF, gate_BSF = multiply_all(normed_BSD, (self.up, self.gate))
            activation = (
                F.silu(gate_BSF) if self.activation == "swiglu" else F.relu(gate_BSF).square()
            )
            hidden_BSF = activation * up_BSF
        update_BSD: Tensor = self.down(self.hidden_norm(hidden_BSF))
        return update_BSD

    def output_projections(self) -> list[nn.Module]:
        """Return the linears that write to the residual stream."""
        return [self.down]
