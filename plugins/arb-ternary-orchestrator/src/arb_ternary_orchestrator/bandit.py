"""Choice of the strategies to try: by an upper confidence bound of their rewards."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

import torch

from arb_ternary.errors import CheckpointError
from arb_ternary_orchestrator.state import Stateful

#: Number of last rewards that a mean is taken over.
REMEMBERED: Final = 20


class Bandit(Stateful):
    """A multi-armed bandit over strategies (UCB1: Auer, Cesa-Bianchi and Fischer 2002).

    The score of a strategy is ``mean + sqrt(exploration * ln(N + 1) / n)``: the mean of its last 20
    rewards, ``n`` its trials, ``N`` all trials. A strategy that was never tried comes before all
    others. A failed trial counts in ``n`` and ``N`` and does not change the mean; a strategy that
    only failed gets the lowest mean of the others.

    Args:
        strategies: distinct names.
        exploration: the factor in the formula.

    Attributes:
        tried: trials per strategy, including failed ones.
        failed: failed trials per strategy.
    """

    state_names: ClassVar[tuple[str, ...]] = ("_rewards", "tried", "failed")

    def __init__(self, strategies: Sequence[str], *, exploration: float = 2.0) -> None:
        self.strategies = tuple(strategies)
        self.exploration = exploration
        self._rewards: dict[str, list[float]] = {name: [] for name in self.strategies}
        self.tried = dict.fromkeys(self.strategies, 0)
        self.failed = dict.fromkeys(self.strategies, 0)

    def mean(self, name: str) -> float | None:
        """Return the mean of the last 20 rewards of a strategy; None without rewards."""
        rewards = self._rewards[name]
        return math.fsum(rewards) / len(rewards) if rewards else None

    def score(self, name: str, multiplier: float = 1.0) -> float:
        """Return the upper confidence bound; infinite for a strategy that was never tried.

        ``multiplier`` says how much the strategy suits the situation. Above 1 it raises the score
        by that share of its magnitude, below 1 it lowers it, also if the score is negative.
        """
        tries = self.tried[name]
        if not tries:
            return math.inf
        mean = self.mean(name)
        if mean is None:
            means = [self.mean(each) for each in self.strategies]
            mean = min((each for each in means if each is not None), default=0.0)
        total = sum(self.tried.values())
        bound = mean + math.sqrt(self.exploration * math.log(total + 1) / tries)
        return bound + (multiplier - 1) * abs(bound)

    def choose(
        self,
        count: int,
        current: str,
        context: Mapping[str, float],
        generator: torch.Generator | None = None,
    ) -> list[str]:
        """Return the strategies with the highest scores, highest first, including ``current``.

        Args:
            count: how many, at least 1.
            current: the strategy in use; if it is not among the best, it replaces the last of them.
            context: multiplier per strategy that suits the situation, see :meth:`score`.
            generator: draws the order of equally good strategies; without one it is that of
                ``strategies``. The number of draws does not depend on the scores.
        """
        ties = [0.0] * len(self.strategies)
        if generator is not None:
            size = len(self.strategies)
            ties = torch.rand(size, generator=generator, dtype=torch.float64).tolist()

        ranks: dict[str, tuple[float, float, float]] = {}
        for name, tie in zip(self.strategies, ties, strict=True):
            # Among untried strategies the one that suits best comes first.
            multiplier = context.get(name, 1.0)
            ranks[name] = self.score(name, multiplier), multiplier, tie
        best = sorted(self.strategies, key=ranks.__getitem__, reverse=True)[:count]
        return best if current in best else [*best[: count - 1], current]

    def reward(self, name: str, value: float) -> None:
        """Record a trial of ``name`` with the reward ``value``, a finite number."""
        rewards = self._rewards[name]
        rewards.append(value)
        del rewards[:-REMEMBERED]
        self.tried[name] += 1

    def fail(self, name: str) -> None:
        """Record a failed trial of ``name``."""
        self.tried[name] += 1
        self.failed[name] += 1

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what :meth:`state_dict` returned.

        Raises:
            CheckpointError: it belongs to other strategies.
        """
        if set(state["tried"]) != set(self.strategies):
            raise CheckpointError(
                f"orchestrator: the checkpoint is of the strategies "
                f"{', '.join(sorted(state['tried']))}; "
                f"the config has {', '.join(sorted(self.strategies))}",
                "Resume with the distributions, and the list, that the run began with, or start a "
                "new run.",
            )
        super().load_state_dict(state)
