"""Sign votes: the reference update rule.

In backward, ``s = sign(g)`` of each micro-batch is subtracted from int8 accumulators; a step turns
accumulators that reached a threshold into flips of one trit step and empties them, and does the
same for the exponents within a band around their origin. Exponents move first, judged on the old
trits, because their scores were taken on those.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from attrs import asdict
from torch import Tensor

from arb_ternary.errors import ConfigError
from arb_ternary.optim.protocol import StepOutcome, Trainable
from arb_ternary.optim.ternary import TernaryOptimizer
from arb_ternary.ternary.linear import TernaryLinear
from arb_ternary.ternary.module import TernaryModule
from arb_ternary_votes.config import SignVotesConfig


def effective_threshold(
    threshold: int, lr: float, gain: float, signal: float | None, mean: float | None
) -> int:
    """``clamp(ceil(theta / (lr * 2 * sigmoid(gain * (l - mean) / |mean|))), 1, 127)``.

    With ``gain`` 0, no signal yet or a mean of zero the sigmoid is one half and the rule is
    ``ceil(theta / lr)``.
    """
    share = 0.5
    if gain and signal is not None and mean:
        share = 1.0 / (1.0 + math.exp(-max(-60.0, min(60.0, gain * (signal - mean) / abs(mean)))))
    return min(127, max(1, math.ceil(round(threshold / (lr * 2.0 * share), 9))))


class SignVotes(TernaryOptimizer):
    """The sign-vote optimizer; see the module's docstring for the rule.

    Args:
        modules: ternary modules by qualified name.
        lr: rate; the effective threshold is ``clamp(ceil(accum_threshold / lr), 1, 127)``, and with
            ``lr = 0`` votes are kept but nothing flips.
        accum_threshold: votes that flip a trit; None takes each module's own. With accumulators of
            4 or 2 bits it is 7 or 1 at most, and the effective threshold likewise.
        e_accum_threshold: votes that move an exponent; None takes each module's own.
        band: how far exponents may move from their origin.
        leak: every this many updates the accumulators move one unit towards zero; 0 is never.
        gain: strength of the loss signal, 0 for none.

    Raises:
        ConfigError: ``accum_threshold`` is beyond the accumulators of a module.
    """

    votes_by_rows = True
    #: Decay of the running mean that the loss signal is compared with.
    SIGNAL_DECAY = 0.99

    def __init__(
        self,
        modules: Mapping[str, TernaryModule],
        *,
        lr: float = 1.0,
        accum_threshold: int | None = None,
        e_accum_threshold: int | None = None,
        band: int = 2,
        leak: int = 0,
        gain: float = 0.0,
    ) -> None:
        config = SignVotesConfig(
            lr=lr,
            accum_threshold=accum_threshold,
            e_accum_threshold=e_accum_threshold,
            band=band,
            leak=leak,
            gain=gain,
        )
        for name, module in modules.items():
            if accum_threshold is not None and accum_threshold > module.shape.largest_vote:
                raise ConfigError(
                    f"accum_threshold: {accum_threshold} is out of reach for the accumulators of "
                    f"{name}, "
                    f"{module.shape.vote_bits} bits, which end at {module.shape.largest_vote}",
                    f"give at most {module.shape.largest_vote}, or leave it out for each module's "
                    f"own",
                )
        self.signal: float | None = None
        self.mean_signal: float | None = None
        self._scales_move = True
        super().__init__(modules, asdict(config))

    @torch.no_grad()
    def step(  # type: ignore[override]
        self,
        closure: Callable[[], Any] | None = None,
        *,
        loss_signal: Tensor | float | None = None,
        accum_threshold: int | None = None,
        update_scales: bool = True,
    ) -> StepOutcome:
        """As any ternary optimizer's; the further arguments are for this step alone.

        Args:
            closure: gives the loss.
            loss_signal: see :meth:`TernaryOptimizer.step`.
            accum_threshold: votes that flip a trit; None = those of the groups.
            update_scales: False leaves exponents, and the votes for them, to a later step.

        Raises:
            ConfigError: ``accum_threshold`` is below 1 or beyond the accumulators.
        """
        own = [group["accum_threshold"] for group in self.param_groups]
        largest = min(module.shape.largest_vote for module in self.modules)
        if accum_threshold is not None and not 1 <= accum_threshold <= largest:
            raise ConfigError(
                f"accum_threshold: must be in 1..{largest} for these accumulators, not "
                f"{accum_threshold}"
            )
        try:
            self._scales_move = update_scales
            for group in self.param_groups:
                group["accum_threshold"] = accum_threshold or group["accum_threshold"]
            return super().step(closure, loss_signal=loss_signal)
        finally:
            self._scales_move = True
            for group, threshold in zip(self.param_groups, own, strict=True):
                group["accum_threshold"] = threshold

    def may_step(self, loss_signal: Tensor | float | None = None, **settings: Any) -> bool:
        """See :class:`TernaryOptimizer`; settings of one step skip none."""
        return super().may_step(loss_signal)

    def _observe_signal(self, signal: float) -> None:
        decay = self.SIGNAL_DECAY
        self.mean_signal = (
            signal if self.mean_signal is None else decay * self.mean_signal + (1 - decay) * signal
        )
        self.signal = signal

    def _apply_group(
        self, group: dict[str, Any], modules: list[TernaryModule]
    ) -> tuple[list[Tensor], list[Tensor]]:
        flips: list[Tensor] = []
        moves: list[Tensor] = []
        if group["lr"] <= 0:
            return flips, moves
        threshold, e_threshold = (
            effective_threshold(
                group[name], group["lr"], group["gain"], self.signal, self.mean_signal
            )
            for name in ("accum_threshold", "e_accum_threshold")
        )
        leak = 1 if group["leak"] and (self.updates + 1) % group["leak"] == 0 else 0
        for module in modules:
            if module.frozen:
                continue
            if self._scales_move:
                moves.append(module.apply_exponent_votes(e_threshold, group["band"], leak))
            # An accumulator of fewer bits is full, and crosses, before a threshold that the rate
            # has raised.
            flips.append(
                module.apply_votes("apply_votes", min(threshold, module.shape.largest_vote), leak)
            )
            if isinstance(module, TernaryLinear):
                module.apply_bias_votes(threshold)
        return flips, moves

    def state_dict(self) -> dict[str, Any]:
        """Settings, counters and the running mean of the loss signal."""
        return {**super().state_dict(), "signal": self.signal, "mean_signal": self.mean_signal}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave."""
        super().load_state_dict(state_dict)
        self.signal = state_dict["signal"]
        self.mean_signal = state_dict["mean_signal"]


def build(config: SignVotesConfig, trainable: Trainable) -> SignVotes:
    """Factory of the optimizer ``sign_votes``: all ternary modules of ``trainable``."""
    return SignVotes(trainable.ternary, **asdict(config))
