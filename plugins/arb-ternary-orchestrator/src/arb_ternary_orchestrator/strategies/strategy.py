"""What a strategy is: a change of the optimizer that a run was configured with, and of its rates
and clipping.
"""

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
from arb_ternary_orchestrator.telemetry import PHASES, Phase
from arb_ternary_train.policy import Adjustment

# : Usual rates of rules for float parameters beside AdamW's. A strategy replaces these rules by one
# another, and leaves : all others in place. Lion: a third to a tenth, says Chen et al., 2023,
# section 5.
RATES: Final = {"adamw": 1.0, "swats": 1.0, "lion": 0.3, "sgd": 30.0}


def keep(leaf: OptimizerChoice) -> OptimizerChoice:
    """The change that changes nothing."""
    return leaf


@frozen(kw_only=True)
class Strategy:
    """A way to go on training. It changes what a run was configured with, so that what it leaves
    alone stays.

    Attributes:
        name: what a config calls it.
        summary: what it is for, in one line.
        float_rate: factor on the rate of float parameters; where ``float_leaf`` puts another rule
            in their place, on that rule's usual rate.
        ternary_rate: factor on the rate of what learns by votes.
        grad_clip: largest norm of the gradient of all float parameters; None = any; ``configured``
            = as the phase says.
        float_leaf: what becomes of an optimizer of float parameters.
        ternary_leaf: what becomes of an optimizer of what learns by votes.
        suits: phases of training in which it is preferred (``Telemetry.phase``).

    An optimizer that trains both by itself keeps its options, and follows the rates.
    """

    name: str
    summary: str
    float_rate: float = field(default=1.0, validator=gt(0.0))
    ternary_rate: float = field(default=1.0, validator=gt(0.0))
    grad_clip: float | Literal["configured"] | None = "configured"
    float_leaf: LeafChange = keep
    ternary_leaf: LeafChange = keep
    suits: tuple[Phase, ...] = field(default=(), validator=deep_iterable(in_(PHASES)))

    def optimizer(self, configured: OptimizerChoice) -> OptimizerChoice:
        """The optimizer of this strategy in a run that was configured with ``configured``.

        It trains the same parts of a model, in the same places of the same wrappers.
        """
        return map_leaves(configured, self.leaf)

    def leaf(self, configured: OptimizerChoice) -> OptimizerChoice:
        """What becomes of an optimizer that holds no other one."""
        if is_float(configured):
            return self.float_leaf(configured)
        return self.ternary_leaf(configured) if is_ternary(configured) else configured

    def adjustment(self, configured: OptimizerChoice) -> Adjustment:
        """Rates and clipping of this strategy in a run that was configured with ``configured``.

        ``float_rate`` takes in that the usual rate of the configured rule may be another than that
        of the strategy's. Clipping stays as it is configured where an optimizer decides over sums
        of several gradients.
        """
        mine = self.optimizer(configured)
        defers = getattr(mine.options, "defers", False)
        return Adjustment(
            float_rate=self.float_rate * _usual_rate(mine) / _usual_rate(configured),
            ternary_rate=self.ternary_rate,
            grad_clip="configured" if defers else self.grad_clip,
        )


def _usual_rate(choice: OptimizerChoice) -> float:
    """Of the first optimizer of float parameters in ``choice``."""
    return next((RATES.get(leaf.name, 1.0) for leaf in leaves_of(choice) if is_float(leaf)), 1.0)
