"""A mixture of feed-forward experts with iterated routing.

Shapes: ``M`` tokens, ``A`` tokens still being refined, ``X`` experts, ``T`` experts per token,
``D`` width, ``U`` tokens that chose one expert.

One pass normalises each token's state, lets a linear router choose ``T`` experts for the token and
adds their gated outputs to the token's update. In the next pass the token is routed again from the
updated state, so that later passes refine earlier ones. A token stops when it chooses the same
experts as in the pass before, and after ``max_moe_iters`` passes at the latest. With one pass this
is the usual mixture of experts.

Every token is decided on its own, and ties go to the expert with the lower number. So a token's
update depends neither on the batch around it nor on how a prompt is cut into chunks.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_text.models.feed_forward import FeedForward
from arb_ternary_text.models.parts import make_linear, make_norm


class Experts(nn.Module):
    """Experts behind a linear router, in the place of a dense feed-forward layer.

    Gates are the softmax of the chosen experts' scores. A single chosen expert is weighted by its
    probability among all experts instead (Fedus et al., Switch Transformers, 2021), because the
    softmax of one score is 1 and would teach the router nothing. A ternary expert casts one set of
    votes per pass in which it was chosen.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.experts_per_token = config.experts_per_token
        self.max_iterations = config.max_moe_iters
        self.residual_scale = 2.0**config.residual_scale
        self.norm = make_norm(config, config.width, gain=True)
        self.router = make_linear(config, config.width, config.experts)
        self.experts = nn.ModuleList(
            FeedForward(config, normalise_input=False) for _ in range(config.experts)
        )

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Return the update that the residual stream ``x_BSD`` gets."""
        x_MD = x_BSD.reshape(-1, x_BSD.size(-1))
        normed_AD = self.norm(x_MD)
        chosen_AT, gate_AT = self.route(normed_AD)
        update_MD = self._mixed(normed_AD, chosen_AT, gate_AT)
        active_A = torch.arange(x_MD.size(0), device=x_MD.device)
        for _ in range(1, self.max_iterations):
            state_AD = torch.add(x_MD[active_A], update_MD[active_A], alpha=self.residual_scale)
            normed_AD = self.norm(state_AD)
            before_AT = chosen_AT
            chosen_AT, gate_AT = self.route(normed_AD)
            moved_A = (chosen_AT != before_AT).any(dim=-1).nonzero().squeeze(-1)
            if moved_A.numel() == 0:
                break

            active_A = active_A[moved_A]
            normed_AD = normed_AD[moved_A]
            chosen_AT = chosen_AT[moved_A]
            gate_AT = gate_AT[moved_A]
            update_MD = update_MD.index_add(0, active_A, self._mixed(normed_AD, chosen_AT, gate_AT))
        return update_MD.view_as(x_BSD)

    def route(self, normed_MD: Tensor) -> tuple[Tensor, Tensor]:
        """Return each token's experts, ascending int64 ``[M, T]``, and their gates ``[M, T]``."""
        score_MX: Tensor = self.router(normed_MD)
        # A stable sort, because topk may take either of two equal scores.
        ranked_MX = score_MX.sort(dim=-1, descending=True, stable=True).indices
        chosen_MT = ranked_MX[:, : self.experts_per_token].sort(dim=-1).values
        if self.experts_per_token == 1:
            return chosen_MT, score_MX.softmax(dim=-1).gather(-1, chosen_MT)
        return chosen_MT, score_MX.gather(-1, chosen_MT).softmax(dim=-1)

    def output_projections(self) -> list[nn.Module]:
        """Return the linears that write to the residual stream."""
        return [expert.down for expert in self.experts if isinstance(expert, FeedForward)]

    def _mixed(self, normed_AD: Tensor, chosen_AT: Tensor, gate_AT: Tensor) -> Tensor:
        """Return the gated sum of the chosen experts' outputs."""
        mixed_AD = torch.zeros_like(normed_AD)
        for number, expert in enumerate(self.experts):
            token_U, choice_U = (chosen_AT == number).nonzero(as_tuple=True)
            if token_U.numel():
                output_UD = gate_AT[token_U, choice_U, None] * expert(normed_AD[token_U])
                mixed_AD = mixed_AD.index_add(0, token_U, output_UD.to(mixed_AD.dtype))
        return mixed_AD
