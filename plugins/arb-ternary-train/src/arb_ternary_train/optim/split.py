"""The optimizer ``split``: one optimizer for ternary modules and one for float parameters."""

from __future__ import annotations

from attrs import evolve
from torch.optim import Optimizer

from arb_ternary.config.choice import OptimizerChoice
from arb_ternary.errors import ConfigError
from arb_ternary.optim.protocol import Trainable, build_optimizer
from arb_ternary_train.optim.config import SplitConfig
from arb_ternary_train.optim.joined import JoinedOptimizer


def build(config: SplitConfig, trainable: Trainable) -> JoinedOptimizer:
    """Build the optimizer ``split``.

    A part is left out if everything of its kind is frozen now or will be added later in the run.

    Raises:
        ConfigError: the model lacks one of the two parts, there is nothing to train in either, or a
            part has what its optimizer cannot train.
    """
    choices: dict[str, OptimizerChoice] = {"ternary": config.ternary, "float": config.float}
    parts = {"ternary": evolve(trainable, floats={}), "float": evolve(trainable, ternary={})}
    built: dict[str, Optimizer] = {}
    for name, part in parts.items():
        if part.parts:
            built[name] = build_optimizer(f"optimizer.{name}", choices[name], part)
            continue
        absent_for_now = name in trainable.idle | trainable.later
        if not absent_for_now or not trainable.parts:
            raise ConfigError(
                f"optimizer.{name}: the model has no {name} parts to train",
                "name the other optimizer alone, without 'split'",
            )
    return JoinedOptimizer(built)
