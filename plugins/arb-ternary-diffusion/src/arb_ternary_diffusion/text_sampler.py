"""Draw the hidden tokens of a text, which may be all of them.

Shapes: ``B`` texts, ``S`` positions, ``V`` ids.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Final, Literal, TypeAlias, get_args

import torch
from attrs import frozen
from torch import Tensor, nn

from arb_ternary.errors import UsageProblem, nearest
from arb_ternary_text.models.generate import draw_token, next_token_probabilities
from arb_ternary_train.capabilities import takes_time

#: Maps tokens ``[B, S]``, some of which are the mask, to logits ``[B, S, V]``.
Predict: TypeAlias = Callable[[Tensor], Tensor]

Order: TypeAlias = Literal["ancestral", "confidence"]
ORDERS: Final[tuple[Order, ...]] = get_args(Order)


@frozen(kw_only=True)
class Filling:
    """How hidden tokens are drawn.

    ``ancestral`` reverses the noise: the step from time ``t`` to ``s`` reveals each hidden token
    with probability ``(t - s) / t``. With equal steps this is 1 divided by the number of steps that
    are left. If there are enough steps to reveal one token at a time, and the model knows the
    truth, the texts have exactly the distribution of the data. Tokens that one step reveals are
    drawn independently, which is the error of few steps (Sahoo et al., 2024).

    ``confidence`` draws every hidden token in each step and keeps those with the highest
    probability, equally many in each step (Chang et al., *MaskGIT*, 2022). Its texts are more
    likely than those of the data, as with a low temperature.

    Attributes:
        steps: most passes through the model; a pass that would reveal nothing is skipped.
        order: which hidden tokens a step reveals.
        temperature: divides the logits; 0 takes the most likely token.
        top_k: draw among this many of the most likely tokens only; None = all.
        top_p: draw among the most likely tokens that together reach this probability; None = all.

    Raises:
        UsageProblem: a value is out of range.
    """

    steps: int
    order: Order = "ancestral"
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __attrs_post_init__(self) -> None:
        next_token_probabilities(torch.zeros(1), self.temperature, self.top_k, self.top_p)
        if self.steps < 1:
            raise UsageProblem(f"steps: must be at least 1, not {self.steps}")
        if self.order not in ORDERS:
            close = nearest(self.order, ORDERS)
            raise UsageProblem(
                f"order: must be {' or '.join(ORDERS)}, not {self.order!r}",
                f"Did you mean {close!r}?" if close else "",
            )

    def states(
        self,
        predict: Predict,
        tokens_BS: Tensor,
        hidden_BS: Tensor,
        mask_token: int,
        generator: torch.Generator,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield tokens and which of them are hidden, both ``[B, S]``, after each step.

        Steps that reveal nothing are left out. After the last one nothing is hidden. Tokens that
        were not hidden at the start never change.

        Args:
            predict: evaluates the model; the logit of the mask is ignored.
            tokens_BS: int64, on the host; the values at hidden positions are ignored.
            hidden_BS: bool, the positions to draw.
            mask_token: the id that stands for a hidden token.
            generator: source of all randomness, on the host.
        """
        tokens_BS = tokens_BS.masked_fill(hidden_BS, mask_token)
        hidden_BS = hidden_BS.clone()
        wanted_B = hidden_BS.sum(dim=1)
        for left in range(self.steps, 0, -1):
            if self.order == "ancestral":
                # Drawn for all positions, so that the number of each does not depend on the others.
                uniform_BS = torch.rand(hidden_BS.shape, dtype=torch.float64, generator=generator)
                revealed_BS = hidden_BS & (uniform_BS * left < 1.0)
                if bool(revealed_BS.any()):
                    drawn_BS, _ = self._draw(predict(tokens_BS), revealed_BS, mask_token, generator)
            else:
                still_hidden_B = wanted_B * (left - 1) // self.steps
                count_B = hidden_BS.sum(dim=1) - still_hidden_B
                if not bool(count_B.any()):
                    continue
                drawn_BS, confidence_BS = self._draw(
                    predict(tokens_BS), hidden_BS, mask_token, generator
                )
                ranks_BS = confidence_BS.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
                revealed_BS = ranks_BS < count_B.unsqueeze(1)
            if bool(revealed_BS.any()):
                tokens_BS = torch.where(revealed_BS, drawn_BS, tokens_BS)
                hidden_BS = hidden_BS & ~revealed_BS
                yield tokens_BS, hidden_BS

    def fill(
        self,
        predict: Predict,
        tokens_BS: Tensor,
        hidden_BS: Tensor,
        mask_token: int,
        generator: torch.Generator,
    ) -> Tensor:
        """Return ``tokens_BS`` with a token at every hidden position; see :meth:`states`."""
        filled_BS = tokens_BS
        for state_BS, _ in self.states(predict, tokens_BS, hidden_BS, mask_token, generator):
            filled_BS = state_BS
        return filled_BS

    def _draw(
        self, logits_BSV: Tensor, where_BS: Tensor, mask_token: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Draw tokens at ``where_BS``; return their ids and the model's probability of each.

        Elsewhere ids are 0 and probabilities -1.
        """
        logits_NV = logits_BSV.detach().to("cpu", torch.float64)[where_BS]
        logits_NV[:, mask_token] = -math.inf
        drawn = [
            draw_token(
                next_token_probabilities(logits_V, self.temperature, self.top_k, self.top_p),
                generator,
            )
            for logits_V in logits_NV
        ]
        drawn_N = torch.tensor(drawn, dtype=torch.int64)
        drawn_BS = torch.zeros(where_BS.shape, dtype=torch.int64).masked_scatter(where_BS, drawn_N)
        probability_N = logits_NV.softmax(dim=1).gather(1, drawn_N.unsqueeze(1)).squeeze(1)
        nowhere_BS = torch.full(where_BS.shape, -1.0, dtype=torch.float64)
        return drawn_BS, nowhere_BS.masked_scatter(where_BS, probability_N)


def predictor(
    model: nn.Module, mask_token: int, vocabulary_size: int, device: torch.device
) -> Predict:
    """Return ``model`` as a function of tokens on the host.

    A model that takes a time gets the share of hidden positions of each text.

    Args:
        model: maps tokens ``[B, S]`` to logits ``[B, S, V']``; its mode is not changed.
        mask_token: the id that stands for a hidden token.
        vocabulary_size: ``V``; further ids of the model are not drawn.
        device: device of the model.
    """
    with_time = takes_time(model)

    @torch.no_grad()
    def predict(tokens_BS: Tensor) -> Tensor:
        hidden_B = (tokens_BS == mask_token).float().mean(dim=1)
        options = {"time": hidden_B.to(device)} if with_time else {}
        logits_BSV: Tensor = model(tokens_BS.to(device), **options)
        return logits_BSV[..., :vocabulary_size]

    return predict
