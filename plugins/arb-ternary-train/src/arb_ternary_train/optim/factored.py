"""An optimizer whose parts learn at different rates: as many of it as there are rates, each for the
parts of one.

So any optimizer can do it, whatever its rate is called. Those inside a wrapper or a ``split`` are
made in that way, and the wrapper sees what it would see without.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeVar

import attrs
from attrs import evolve, frozen
from torch.optim import Optimizer

from arb_ternary.config.choice import Choice, OptimizerChoice
from arb_ternary.optim.protocol import Trainable, build_optimizer, takes_loss_signal
from arb_ternary.specs import OptimizerSpec
from arb_ternary_train.optim.joined import JoinedOptimizer
from arb_ternary_train.schedules import RATE_FACTOR, scheduled_groups

P = TypeVar("P")

_TARGET: Final = "arb_ternary_train.optim.factored:build"


@frozen
class _Factored:
    """The optimizer ``choice``, and by the names of parts what their rates are multiplied by; 1
    where none is given.
    """

    choice: OptimizerChoice
    factors: Mapping[str, float]


class FactoredOptimizer(JoinedOptimizer):
    """The same optimizer several times, each over parts of one rate; ``parts`` are called by their
    factors.
    """

    def may_step(self, **signals: Any) -> bool:
        """Whether none of them would skip a step now."""
        asked = [(part, getattr(part, "may_step", None)) for part in self.parts.values()]
        return all(
            ask is None or ask(**(signals if takes_loss_signal(part) else {}))
            for part, ask in asked
        )


def with_factors(choice: OptimizerChoice, factors: Mapping[str, float]) -> OptimizerChoice:
    """``choice``, in which every optimizer that has no other inside learns the parts in ``factors``
    at their rates.
    """
    if not factors:
        return choice
    inside = {
        field.name: with_factors(value, factors)
        for field in (attrs.fields(type(choice.options)) if attrs.has(type(choice.options)) else ())
        if isinstance(value := getattr(choice.options, field.name), Choice)
        and isinstance(value.spec, OptimizerSpec)
    }
    if inside:
        return evolve(choice, options=evolve(choice.options, **inside))
    spec = OptimizerSpec(name=choice.name, target=_TARGET, accepts=choice.spec.accepts)
    return evolve(choice, options=_Factored(choice, factors), spec=spec)


def build(config: _Factored, trainable: Trainable) -> Optimizer:
    """The optimizers of ``config`` over ``trainable``, that of the unchanged rate first.

    Raises:
        ConfigError: one of them cannot train its parts.
    """
    wanted = {config.factors.get(name, 1.0) for part in trainable.parts.values() for name in part}
    made = {
        str(factor): _made(config, trainable, factor)
        for factor in sorted(wanted, key=lambda x: (x != 1.0, -x))
    }
    if not made:
        return build_optimizer("optimizer", config.choice, trainable)
    return next(iter(made.values())) if len(made) == 1 else FactoredOptimizer(made)


def _made(config: _Factored, trainable: Trainable, factor: float) -> Optimizer:
    """The optimizer of the parts with this factor."""

    def own(parts: Mapping[str, P]) -> dict[str, P]:
        return {
            name: part for name, part in parts.items() if config.factors.get(name, 1.0) == factor
        }

    part = evolve(
        trainable,
        ternary=own(trainable.ternary),
        floats=own(trainable.floats),
        stored=own(trainable.stored),
    )
    optimizer = build_optimizer("optimizer", config.choice, part)
    if factor != 1.0:
        for group in scheduled_groups(optimizer):
            group["lr"] *= factor
            group[RATE_FACTOR] = factor
    return optimizer
