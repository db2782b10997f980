"""Two optimizers as one: one for the ternary modules of a model, one for its float parameters.

Modules with integer weights of their own format (:mod:`arb_ternary.ternary.models`) belong to the
ternary part.
"""

from __future__ import annotations

from attrs import evolve
from torch.optim import Optimizer

from arb_ternary.errors import ConfigError
from arb_ternary.optim.protocol import Trainable, build_optimizer
from arb_ternary_train.optim.config import SplitConfig
from arb_ternary_train.optim.joined import JoinedOptimizer


def build(config: SplitConfig, trainable: Trainable) -> JoinedOptimizer:
    """Factory of the optimizer ``split``.

    A part of which the model has everything frozen now, or will have something only later in the
    run, is left out.

    Raises:
        ConfigError: the model lacks one of the two parts, there is nothing to train in either, or a
            part has what its optimizer cannot train.
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
