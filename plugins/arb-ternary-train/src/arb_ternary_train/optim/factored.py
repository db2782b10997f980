"""An optimizer whose parts learn at different rates: one instance of it per rate.

So any optimizer can do it, whatever its rate is called. Optimizers inside a wrapper or a ``split``
are made in this way, and the wrapper sees what it would see without.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeVar

import attrs
from attrs import evolve, frozen
from torch.optim import Optimizer

from arb_ternary.config.choice import Choice, OptimizerChoice
from arb_ternary.optim.protocol import Trainable, build_optimizer
from arb_ternary.specs import OptimizerSpec
from arb_ternary_train.optim.joined import JoinedOptimizer, part_may_step
from arb_ternary_train.schedules import RATE_FACTOR, scheduled_groups

P = TypeVar("P")

_TARGET: Final = "arb_ternary_train.optim.factored:build"


@frozen
class _FactoredConfig:
    """Options of the factored optimizer.

    Attributes:
        choice: the optimizer.
        factors: factors on the rates of parts, by name; 1 for parts without one.
    """

    choice: OptimizerChoice
    factors: Mapping[str, float]


class FactoredOptimizer(JoinedOptimizer):
    """Several instances of an optimizer, each over parts of one rate, named by their factors."""

    def may_step(self, **signals: Any) -> bool:
        """Return whether none of them would skip a step now."""
        return all(part_may_step(part, signals) for part in self.parts.values())


def with_factors(choice: OptimizerChoice, factors: Mapping[str, float]) -> OptimizerChoice:
    """Return ``choice``, changed so that parts in ``factors`` learn at their rates.

    An optimizer with others inside stays; the innermost optimizers are factored.
    """
    if not factors:
        return choice
    inside: dict[str, OptimizerChoice] = {}
    if attrs.has(type(choice.options)):
        for field in attrs.fields(type(choice.options)):
            value = getattr(choice.options, field.name)
            if isinstance(value, Choice) and isinstance(value.spec, OptimizerSpec):
                inside[field.name] = with_factors(value, factors)
    if inside:
        return evolve(choice, options=evolve(choice.options, **inside))
    spec = OptimizerSpec(name=choice.name, target=_TARGET, accepts=choice.spec.accepts)
    return evolve(choice, options=_FactoredConfig(choice, factors), spec=spec)


def build(config: _FactoredConfig, trainable: Trainable) -> Optimizer:
    """Build one optimizer per factor over ``trainable``, that of the unchanged rate first.

    Raises:
        ConfigError: one of them cannot train its parts.
    """
    wanted = {config.factors.get(name, 1.0) for part in trainable.parts.values() for name in part}
    if not wanted:
        return build_optimizer("optimizer", config.choice, trainable)
    ordered = sorted(wanted, key=lambda factor: (factor != 1.0, -factor))
    built = {str(factor): _build_part(config, trainable, factor) for factor in ordered}
    return next(iter(built.values())) if len(built) == 1 else FactoredOptimizer(built)


def _build_part(config: _FactoredConfig, trainable: Trainable, factor: float) -> Optimizer:
    """Build the optimizer of the parts with this factor."""

    def own(parts: Mapping[str, P]) -> dict[str, P]:
        factors = config.factors
        return {name: part for name, part in parts.items() if factors.get(name, 1.0) == factor}

    part = evolve(trainable, ternary=own(trainable.ternary), floats=own(trainable.floats))
    optimizer = build_optimizer("optimizer", config.choice, part)
    if factor != 1.0:
        for group in scheduled_groups(optimizer):
            group["lr"] *= factor
            group[RATE_FACTOR] = factor
    return optimizer
