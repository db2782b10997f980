"""Strategies: changes of a run's configured optimizer, of its rates and of gradient clipping."""

from __future__ import annotations

from typing import Final, Literal

from attrs import field, frozen
from attrs.validators import deep_iterable, gt, in_

from arb_ternary.config.choice import OptimizerChoice
from arb_ternary_orchestrator.strategies.transform import (
    LeafChange,
    is_float,
    is_ternary,
    leaves_of,
    map_leaves,
)
from arb_ternary_orchestrator.training_phases import PHASES, Phase
from arb_ternary_train.policy import Adjustment

#: Usual rates of rules for float parameters, relative to AdamW's. A strategy replaces these rules
#: by one another and keeps all others. Lion: a third to a tenth (Chen et al. 2023, section 5).
RATES: Final = {"adamw": 1.0, "swats": 1.0, "lion": 0.3, "sgd": 30.0}


def keep(leaf: OptimizerChoice) -> OptimizerChoice:
    """Return ``leaf`` unchanged."""
    return leaf


@frozen(kw_only=True)
class Strategy:
    """A way to continue training, as changes of the run's configuration.

    An optimizer that trains both ternary and float parameters itself keeps its options, and follows
    the rates.

    Attributes:
        name: what a config calls it.
        summary: its purpose, in one line.
        float_rate: factor on the rate of float parameters. If ``float_leaf`` replaces their rule,
            it is a factor on the new rule's usual rate.
        ternary_rate: factor on the rate of parts that learn by votes.
        grad_clip: largest norm of the gradient of all float parameters; None = any; ``configured``
            = as the phase says.
        float_leaf: change of an optimizer of float parameters.
        ternary_leaf: change of an optimizer of parts that learn by votes.
        suits: phases of training in which it is preferred (``Telemetry.phase``).
    """

    name: str
    summary: str = ""
    float_rate: float = field(default=1.0, validator=gt(0.0))
    ternary_rate: float = field(default=1.0, validator=gt(0.0))
    grad_clip: float | Literal["configured"] | None = "configured"
    float_leaf: LeafChange = keep
    ternary_leaf: LeafChange = keep
    suits: tuple[Phase, ...] = field(default=(), validator=deep_iterable(in_(PHASES)))

    def optimizer(self, configured: OptimizerChoice) -> OptimizerChoice:
        """Return the optimizer of this strategy in a run with the optimizer ``configured``.

        It trains the same parts of a model, inside the same wrappers.
        """
        return map_leaves(configured, self.leaf)

    def leaf(self, configured: OptimizerChoice) -> OptimizerChoice:
        """Return the change of an optimizer that contains no other one."""
        if is_float(configured):
            return self.float_leaf(configured)
        return self.ternary_leaf(configured) if is_ternary(configured) else configured

    def adjustment(self, configured: OptimizerChoice) -> Adjustment:
        """Return rates and clipping of this strategy in a run with the optimizer ``configured``.

        ``float_rate`` includes the ratio between the usual rates of the strategy's and of the
        configured rule. Clipping stays as configured if an optimizer decides over sums of several
        gradients.
        """
        mine = self.optimizer(configured)
        defers = getattr(mine.options, "defers", False)
        return Adjustment(
            float_rate=self.float_rate * _usual_rate(mine) / _usual_rate(configured),
            ternary_rate=self.ternary_rate,
            grad_clip="configured" if defers else self.grad_clip,
        )


def _usual_rate(choice: OptimizerChoice) -> float:
    """Return the usual rate of the first optimizer of float parameters in ``choice``."""
    for leaf in leaves_of(choice):
        if is_float(leaf):
            return RATES.get(leaf.name, 1.0)
    return 1.0
