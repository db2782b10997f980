"""Which strategies are worth a trial: an upper confidence bound of what each has brought."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from arb_ternary.errors import CheckpointError, UsageProblem, nearest

#: A mean looks at so many rewards, the last ones.
REMEMBERED: Final = 20


class Bandit:
    """A multi-armed bandit over strategies (UCB1: Auer, Cesa-Bianchi and Fischer 2002).

    The score of a strategy is ``mean + sqrt(exploration * ln(N + 1) / n)``: the mean of its last 20
    rewards, ``n`` the times it was tried, ``N`` the times any was. One that has never been tried
    comes before all that have. A failed trial counts in ``n`` and ``N`` and leaves the mean alone;
    a strategy that has done nothing but fail is given the lowest mean of the others.

    Args:
        strategies: names, without repetition.
        exploration: what the formula has there.
    """

    def __init__(self, strategies: Sequence[str], *, exploration: float = 2.0) -> None:
        if not strategies or len(set(strategies)) != len(strategies):
            raise ValueError(
                f"the names of strategies have to differ, and there has to be one: "
                f"{list(strategies)}"
            )
        self.strategies = tuple(strategies)
        self.exploration = exploration
        self._rewards: dict[str, list[float]] = {name: [] for name in self.strategies}
        self._tried = dict.fromkeys(self.strategies, 0)
        self._failed = dict.fromkeys(self.strategies, 0)

    @property
    def tried(self) -> dict[str, int]:
        """Trials of each strategy, failed ones among them."""
        return dict(self._tried)

    @property
    def failed(self) -> dict[str, int]:
        """Failed trials of each strategy."""
        return dict(self._failed)

    def mean(self, name: str) -> float | None:
        """Mean of the last 20 rewards of a strategy; None where it has none."""
        rewards = self._rewards[self._known(name)]
        return math.fsum(rewards) / len(rewards) if rewards else None

    def score(self, name: str, multiplier: float = 1.0) -> float:
        """The upper confidence bound; infinite for a strategy that has never been tried.

        ``multiplier`` is what the situation makes of it. Above 1 it raises the score by that share
        of its magnitude, below 1 it lowers it: also a negative score rises where the strategy
        suits.
        """
        tries = self._tried[self._known(name)]
        if not tries:
            return math.inf
        mean = self.mean(name)
        if mean is None:
            mean = min(
                (known for each in self.strategies if (known := self.mean(each)) is not None),
                default=0.0,
            )
        bound = mean + math.sqrt(self.exploration * math.log(sum(self._tried.values()) + 1) / tries)
        return bound + (multiplier - 1) * abs(bound)

    def choose(
        self,
        count: int,
        current: str,
        context: Mapping[str, float],
        generator: torch.Generator | None = None,
    ) -> list[str]:
        """The ``count`` strategies with the highest scores, highest first; ``current`` is always
        among them.

        Args:
            count: how many, at least 1.
            current: the strategy in use; where it is not among the best, it takes the place of the
                last of them.
            context: by which factor a strategy suits the situation; 1 for one that is not named.
            generator: draws the order of strategies that are equally good; without one it is that
                of ``strategies``. It is advanced by the same number of draws, whatever the scores
                are.
        """
        self._known(current)
        for name in context:
            self._known(name)
        ties = [0.0] * len(self.strategies)
        if generator is not None:
            ties = torch.rand(
                len(self.strategies), generator=generator, dtype=torch.float64
            ).tolist()
        places = {
            # Among those that have not been tried, the one that suits best comes first.
            name: (self.score(name, factor := context.get(name, 1.0)), factor, tie)
            for name, tie in zip(self.strategies, ties, strict=True)
        }
        order = sorted(self.strategies, key=places.__getitem__, reverse=True)
        best = order[:count]
        return best if current in best else [*best[: count - 1], current]

    def reward(self, name: str, value: float) -> None:
        """A trial of ``name`` brought ``value``.

        Raises:
            ValueError: it is not finite; that is a failed trial.
        """
        if not math.isfinite(value):
            raise ValueError(f"strategy {name!r}: a reward of {value} is a failed trial")
        rewards = self._rewards[self._known(name)]
        rewards.append(value)
        del rewards[:-REMEMBERED]
        self._tried[name] += 1

    def fail(self, name: str) -> None:
        """A trial of ``name`` came to nothing."""
        self._tried[self._known(name)] += 1
        self._failed[name] += 1

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        rewards = {name: list(values) for name, values in self._rewards.items()}
        return {"rewards": rewards, "tried": dict(self._tried), "failed": dict(self._failed)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what :meth:`state_dict` gave.

        Raises:
            CheckpointError: it is of other strategies.
        """
        if set(state["tried"]) != set(self.strategies):
            raise CheckpointError(
                f"orchestrator: the checkpoint is of the strategies "
                f"{', '.join(sorted(state['tried']))}; "
                f"the config has {', '.join(sorted(self.strategies))}",
                "Resume with the distributions, and the list, that the run began with, or start a "
                "new run.",
            )
        self._rewards = {name: list(state["rewards"][name]) for name in self.strategies}
        self._tried = {name: state["tried"][name] for name in self.strategies}
        self._failed = {name: state["failed"][name] for name in self.strategies}

    def _known(self, name: str) -> str:
        if name not in self._rewards:
            close = nearest(name, self.strategies)
            hint = f"did you mean {close!r}?\n" if close else ""
            raise UsageProblem(
                f"strategy {name!r} is not among those of this run",
                f"{hint}available: {', '.join(self.strategies)}",
            )
        return name
