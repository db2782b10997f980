"""Recipes of the quality bench: each baseline with its published schedule and four settings to
choose from.

The embedding and the head are float parts trained by AdamW in every recipe, as in the papers and as
in core's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from arb_ternary_bench.quality.protocol import Recipe, rate_for

_FLOAT_PARTS: Final = ["embedding", "head", "linears"]
#: What the bench's base config has for ternary linears and does not apply to these models.
_WITHOUT: Final = ("model.group_size", "model.scale_rule")


def bitnet(steps: int) -> Recipe:
    """BitNet b1.58 trained by AdamW on one falling schedule."""
    return _bitnet(steps, {"float_parts": _FLOAT_PARTS})


def bitnet_gains(steps: int) -> Recipe:
    """The same with learned gains in all norms, also those of queries, keys and what enters the
    last projections.
    """
    return _bitnet(steps, {"float_parts": [*_FLOAT_PARTS, "norms"], "inner_gains": True})


def _bitnet(steps: int, model: Mapping[str, Any]) -> Recipe:
    return Recipe(
        overrides={
            "model": {"name": "bitnet", **model},
            "optimizer": {"name": "bitnet_adamw", "weight_decay": 0.01},
            "phase": {"lr_schedule": "linear"},
        },
        trials=tuple({"optimizer": {"lr": rate_for(steps, lr)}} for lr in (3e-3, 4e-3, 6e-3, 8e-3)),
        without=_WITHOUT,
    )


def bitnet_two_stage(steps: int) -> Recipe:
    """BitNet b1.58 with the published recipe: two-stage schedule, weight decay 0.1 in the first
    half only.
    """
    return Recipe(
        overrides={
            "model": {"name": "bitnet", "float_parts": _FLOAT_PARTS},
            "optimizer": {
                "name": "bitnet_adamw",
                "weight_decay": 0.1,
                "decay_steps": (steps + 1) // 2,
            },
            "phase": {"lr_schedule": "two_stage"},
        },
        trials=tuple(
            {"optimizer": {"lr": rate_for(steps, lr)}} for lr in (2e-3, 4e-3, 8e-3, 12e-3)
        ),
        without=_WITHOUT,
    )


def dqt_int8(steps: int) -> Recipe:
    """Direct quantised training with 8-bit weights."""
    return _direct(
        "int8",
        [
            ({"name": "dqt", "lr": lr}, float_lr)
            for lr in (8e-3, 16e-3)
            for float_lr in (4e-3, 8e-3)
        ],
    )


def dqt_ternary(steps: int) -> Recipe:
    """Direct quantised training with ternary weights."""
    return _direct(
        "ternary",
        [({"name": "dqt", "lr": lr}, float_lr) for lr in (4e-3, 8e-3) for float_lr in (4e-3, 8e-3)],
    )


def bop(steps: int) -> Recipe:
    """Ternary flips on a momentum, as published and normalised by each weight's second moment
    (Bop2ndOrder).
    """
    published = {"name": "bop", "gamma": 1e-3, "tau": 1e-5}
    normalised = [
        {"name": "bop", "normalise": True, "sigma": 1e-2, "gamma": gamma, "tau": tau}
        for gamma, tau in ((1e-2, 0.1), (1e-2, 0.2), (3e-2, 0.2))
    ]
    return _direct("ternary", [(setting, 4e-3) for setting in (published, *normalised)])


def _direct(levels: str, trials: Sequence[tuple[dict[str, Any], float]]) -> Recipe:
    """A recipe of the model ``direct``.

    Args:
        levels: of its weights.
        trials: options of their optimizer, and the learning rate of the float parts.
    """
    return Recipe(
        overrides={
            "model": {"name": "direct", "levels": levels, "float_parts": _FLOAT_PARTS},
            "optimizer": {"name": "split", "float": {"name": "adamw", "weight_decay": 0.0}},
            "phase": {"lr_schedule": "linear"},
        },
        trials=tuple(
            {"optimizer": {"ternary": options, "float": {"lr": lr}}} for options, lr in trials
        ),
        without=_WITHOUT,
    )
