"""Sign votes: the reference update rule.

In backward, ``s = sign(g)`` of each micro-batch is subtracted from int8 accumulators; a step turns
accumulators that reached a threshold into flips of one trit step and empties them, and does the
same for the exponents within a band around their origin. Exponents move first, judged on the old
trits, because their scores were taken on those.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import asdict

from arb_ternary.errors import ConfigError
from arb_ternary.optim.protocol import Trainable
from arb_ternary.optim.ternary import TernaryOptimizer, VoteUpdate
from arb_ternary.ternary.module import TernaryModule
from arb_ternary_votes.config import SignVotesConfig


def effective_threshold(
    threshold: int,
    lr: float,
    gain: float = 0.0,
    signal: float | None = None,
    mean: float | None = None,
) -> int:
    """Return ``clamp(ceil(theta / (lr * 2 * sigmoid(gain * (l - mean) / |mean|))), 1, 127)``.

    If ``gain`` is 0, there is no signal yet or the mean is zero, the sigmoid is one half, and the
    rule is ``ceil(theta / lr)``.

    Args:
        threshold: ``theta``, votes that flip a trit at the rate 1.
        lr: the rate.
        gain: strength of the loss signal.
        signal: ``l``, the loss signal of this step.
        mean: running mean of the loss signal.
    """
    share = 0.5
    if gain and signal is not None and mean:
        exponent = gain * (signal - mean) / abs(mean)
        share = 1.0 / (1.0 + math.exp(-max(-60.0, min(60.0, exponent))))
    exact = round(threshold / (lr * 2.0 * share), 9)
    return min(127, max(1, math.ceil(exact)))


class SignVotes(TernaryOptimizer):
    """The sign-vote optimizer; see the module's docstring for the rule.

    Args:
        modules: ternary modules by qualified name.
        options: see :class:`~arb_ternary_votes.config.SignVotesConfig`. The effective threshold is
            ``clamp(ceil(accum_threshold / lr), 1, 127)``, and with ``lr = 0`` votes are kept but
            nothing flips. With accumulators of 4 or 2 bits it is 7 or 1 at most.

    Raises:
        ConfigError: ``accum_threshold`` is beyond the accumulators of a module.
    """

    votes_by_rows = True
    #: Decay of the running mean that the loss signal is compared with.
    SIGNAL_DECAY = 0.99

    def __init__(self, modules: Mapping[str, TernaryModule], **options: Any) -> None:
        config = SignVotesConfig(**options)
        threshold = config.accum_threshold
        for name, module in modules.items():
            if threshold is not None and threshold > module.shape.largest_vote:
                raise ConfigError(
                    f"accum_threshold: {threshold} is out of reach for the accumulators of "
                    f"{name}, {module.shape.vote_bits} bits, which end at "
                    f"{module.shape.largest_vote}",
                    f"give at most {module.shape.largest_vote}, or leave it out for each module's "
                    f"own",
                )
        self.signal: float | None = None
        self.mean_signal: float | None = None
        # Settings of the step under way.
        self._threshold = 1
        self._exponent_threshold = 1
        self._leak = 0
        super().__init__(modules, asdict(config))

    def _observe_signal(self, signal: float) -> None:
        self.signal = signal
        if self.mean_signal is None:
            self.mean_signal = signal
        else:
            decay = self.SIGNAL_DECAY
            self.mean_signal = decay * self.mean_signal + (1 - decay) * signal

    def begin_group(self, group: dict[str, Any], modules: Sequence[TernaryModule]) -> None:
        """Compute the thresholds of this step."""
        if group["lr"] <= 0:
            return
        signals = (self.signal, self.mean_signal)
        self._threshold = effective_threshold(
            group["accum_threshold"], group["lr"], group["gain"], *signals
        )
        self._exponent_threshold = effective_threshold(
            group["e_accum_threshold"], group["lr"], group["gain"], *signals
        )
        leaks = group["leak"] and (self.updates + 1) % group["leak"] == 0
        self._leak = 1 if leaks else 0

    def update_of(self, group: Mapping[str, Any], module: TernaryModule) -> VoteUpdate:
        """Flip the trits whose accumulators reached the threshold."""
        # An accumulator of fewer bits is full, and crosses, before a threshold that the rate has
        # raised.
        threshold = min(self._threshold, module.shape.largest_vote)
        return VoteUpdate(
            "apply_votes",
            (threshold, self._leak),
            bias_threshold=self._threshold,
            exponent_threshold=self._exponent_threshold,
            exponent_leak=self._leak,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return settings, counters and the running mean of the loss signal."""
        return {**super().state_dict(), "signal": self.signal, "mean_signal": self.mean_signal}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        super().load_state_dict(state_dict)
        self.signal = state_dict["signal"]
        self.mean_signal = state_dict["mean_signal"]


def build(config: SignVotesConfig, trainable: Trainable) -> SignVotes:
    """Build the optimizer ``sign_votes`` over all ternary modules of ``trainable``."""
    return SignVotes(trainable.ternary, **asdict(config))
