"""The strategies that a loop chooses among, and switching between them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from arb_ternary.config.choice import OptimizerChoice
from arb_ternary.errors import ConfigError
from arb_ternary.optim.protocol import collect_trainable
from arb_ternary_orchestrator.strategies import Strategy, wrap_floats
from arb_ternary_orchestrator.strategies.carry import carry_state
from arb_ternary_orchestrator.strategies.lookup import strategies_of

if TYPE_CHECKING:
    from arb_ternary_orchestrator.config import OrchestratorConfig
    from arb_ternary_orchestrator.snapshots import Kept
    from arb_ternary_orchestrator.training_phases import Phase
    from arb_ternary_train.loop import TrainingLoop

#: Factor on the score of a strategy in a phase of training that it suits.
_PREFERENCE: Final = 1.25


class Strategies:
    """The strategies that a loop chooses among.

    Args:
        config: which they are, and what they have in common.
        loop: the loop; strategies that make no difference to it are left out.

    Attributes:
        current: the strategy in use; before the first :meth:`switch` the configured optimizer.

    Raises:
        UsageProblem: a strategy does not exist.
    """

    def __init__(self, config: OrchestratorConfig, loop: TrainingLoop) -> None:
        self._config = config
        self._configured = loop.context.config.optimizer
        found = strategies_of(
            config.initial_strategy,
            config.safety_strategy,
            config.strategies,
            self._configured,
            collect_trainable(loop.model).parts.keys(),
        )
        self._by_name: dict[str, Strategy] = {each.name: each for each in found}
        self.current = "configured"

    @property
    def names(self) -> tuple[str, ...]:
        """All names, the initial strategy first."""
        return tuple(self._by_name)

    def preferred(self, phase: Phase) -> dict[str, float]:
        """Return the factor by which each strategy that suits ``phase`` is preferred."""
        return {
            name: _PREFERENCE for name, strategy in self._by_name.items() if phase in strategy.suits
        }

    def slower(self) -> dict[str, float]:
        """Return how many times slower votes are under each strategy with a lower rate of votes
        than the current one.
        """
        rate = self._by_name[self.current].ternary_rate
        rates = {each.name: each.ternary_rate for each in self._by_name.values()}
        return {name: rate / other for name, other in rates.items() if other < rate}

    def switch(self, loop: TrainingLoop, name: str) -> None:
        """Continue with ``name``; state that both optimizers have is carried over.

        Raises:
            ConfigError: the strategy's optimizer cannot train the model.
        """
        old = loop.optimizer
        self.resume(loop, name)
        if loop.optimizer is not old:
            carry_state(old, loop.optimizer)

    def put_back(self, loop: TrainingLoop, kept: Kept, name: str, *, cursor: bool = True) -> None:
        """Restore a snapshot that was taken under ``name``; see ``Snapshot.restore``."""
        self.resume(loop, name)
        kept.get().restore(loop, cursor=cursor)

    def resume(self, loop: TrainingLoop, name: str) -> None:
        """Continue with ``name``, before the state of its optimizer is loaded."""
        strategy = self._by_name[name]
        choice = self._with_common(strategy.optimizer(self._configured))
        if choice != loop.optimizer_choice:
            _use(loop, choice, name)
        loop.adjustment = strategy.adjustment(self._configured)
        self.current = name

    def _with_common(self, choice: OptimizerChoice) -> OptimizerChoice:
        config = self._config
        if config.use_adagc:
            options = {"warmup": config.adagc_warmup, "threshold": config.adagc_threshold}
            choice = wrap_floats(choice, "adagc", **options)
        return wrap_floats(choice, "nowcasting") if config.use_nowcasting else choice


def _use(loop: TrainingLoop, choice: OptimizerChoice, name: str) -> None:
    """Give the loop the optimizer of a strategy, or leave it with the one that it has."""
    old = loop.optimizer
    try:
        loop.use_optimizer(choice)
    except (ConfigError, ValueError) as error:
        # Building an optimizer prepares ternary modules for its votes: prepare them for the old one
        # again.
        loop.use_optimizer(loop.optimizer_choice)
        loop.optimizer.load_state_dict(old.state_dict())
        why = error.what if isinstance(error, ConfigError) else str(error)
        raise ConfigError(
            f"strategy {name!r}: its optimizer cannot be made for this model: {why}"
        ) from error
