"""Two optimizers as one: one for the ternary modules of a model, one for its float parameters.

Modules with integer weights of their own format (:mod:`arb_ternary.ternary.models`) belong to the ternary part.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from attrs import evolve, frozen
from torch.optim import Optimizer

from arb_ternary.config.choice import OptimizerChoice
from arb_ternary.config.options import default_choice
from arb_ternary.errors import ConfigError
from arb_ternary.optim.protocol import Planned, Trainable, build_optimizer
from arb_ternary.optim.ternary import JoinedOptimizer

__all__ = ["SplitConfig", "build"]

#: What each of the two optimizers trains.
_KINDS: Final = {"ternary": frozenset({"ternary", "stored"}), "float": frozenset({"float"})}


@frozen(kw_only=True)
class SplitConfig:
    """Options of ``split``: which optimizer trains which part."""

    ternary: OptimizerChoice = default_choice("scaled_votes", "Optimizer of the ternary modules.")
    float: OptimizerChoice = default_choice("adamw", "Optimizer of the float parameters.")

    @property
    def defers(self) -> bool:
        """Whether one of the two may put a step off."""
        return any(getattr(part.options, "defers", False) for part in (self.ternary, self.float))

    def planned_for(self, name: str, planned: Planned) -> Planned:
        """What the optimizer ``name`` is given of ``planned``."""
        return evolve(planned, kinds=planned.kinds & _KINDS[name], idle=planned.idle & _KINDS[name])

    def contradictions_in(self, run: Any, planned: Planned | None) -> Iterator[tuple[str, str]]:
        """Parts that the model lacks."""
        for name, kinds in _KINDS.items():
            if planned is not None and not kinds & (planned.kinds | planned.idle):
                yield name, f"the model has no {name} parts to train; name the other optimizer alone, without 'split'"


def build(config: SplitConfig, trainable: Trainable) -> JoinedOptimizer:
    """Factory of the optimizer ``split``.

    A part of which the model has everything frozen now, or will have something only later in the run, is left out.

    Raises:
        ConfigError: the model lacks one of the two parts, there is nothing to train in either, or a part has what its
            optimizer cannot train.
    """
    parts: dict[str, Optimizer] = {}
    for name, choice, part, kinds in (
        ("ternary", config.ternary, evolve(trainable, floats={}), {"ternary", "stored"}),
        ("float", config.float, evolve(trainable, ternary={}, stored={}), {"float"}),
    ):
        if not part.parts and (trainable.idle | trainable.later) & kinds and trainable.parts:
            continue
        if not part.parts:
            raise ConfigError(
                f"optimizer.{name}: the model has no {name} parts to train",
                "name the other optimizer alone, without 'split'",
            )
        parts[name] = build_optimizer(f"optimizer.{name}", choice, part)
    return JoinedOptimizer(parts)
