"""Recipes of the quality bench: each baseline with its published schedule and four settings to choose from.

The embedding and the head are float parts trained by AdamW in every recipe, as in the papers and as in core's own.
"""

from __future__ import annotations

from typing import Any, Final

from arb_ternary.run.quality.protocol import Recipe

__all__ = ["bitnet", "bitnet_two_stage", "bop", "dqt_int8", "dqt_ternary"]

_FLOAT_PARTS: Final = ["embedding", "head", "linears"]
#: What the bench's base config has for ternary linears and does not apply to these models.
_WITHOUT: Final = ("model.group_size", "model.scale_rule")


def bitnet(steps: int) -> Recipe:
    """BitNet b1.58 trained by AdamW on one falling schedule."""
    return Recipe(
        overrides={
            "model": {"name": "bitnet", "float_parts": _FLOAT_PARTS},
            "optimizer": {"name": "bitnet_adamw", "weight_decay": 0.01},
        },
        trials=tuple(
            {"optimizer": {"lr": lr}, "phase": {"lr_schedule": schedule}}
            for lr, schedule in ((4e-3, "linear"), (8e-3, "cosine"), (8e-3, "linear"), (12e-3, "linear"))
        ),
        without=_WITHOUT,
    )


def bitnet_two_stage(steps: int) -> Recipe:
    """BitNet b1.58 with the published recipe: two-stage schedule, weight decay 0.1 in the first half only."""
    return Recipe(
        overrides={
            "model": {"name": "bitnet", "float_parts": _FLOAT_PARTS},
            "optimizer": {"name": "bitnet_adamw", "weight_decay": 0.1, "decay_steps": (steps + 1) // 2},
            "phase": {"lr_schedule": "two_stage"},
        },
        trials=tuple({"optimizer": {"lr": lr}} for lr in (2e-3, 4e-3, 8e-3, 12e-3)),
        without=_WITHOUT,
    )


def dqt_int8(steps: int) -> Recipe:
    """Direct quantised training with 8-bit weights."""
    return _direct("int8", {"name": "dqt"}, tuple({"lr": lr} for lr in (4e-3, 8e-3, 16e-3, 32e-3)))


def dqt_ternary(steps: int) -> Recipe:
    """Direct quantised training with ternary weights."""
    return _direct("ternary", {"name": "dqt"}, tuple({"lr": lr} for lr in (2e-3, 4e-3, 8e-3, 16e-3)))


def bop(steps: int) -> Recipe:
    """Ternary flips on a momentum, as published and normalised by each weight's second moment (Bop2ndOrder)."""
    published = {"gamma": 1e-3, "tau": 1e-5}
    normalised = tuple(
        {"normalise": True, "sigma": 1e-2, "gamma": gamma, "tau": tau}
        for gamma, tau in ((1e-2, 0.1), (1e-2, 0.2), (3e-3, 0.1))
    )
    return _direct("ternary", {"name": "bop"}, (published, *normalised))


def _direct(levels: str, optimizer: dict[str, Any], settings: tuple[dict[str, Any], ...]) -> Recipe:
    return Recipe(
        overrides={
            "model": {"name": "direct", "levels": levels, "float_parts": _FLOAT_PARTS},
            "optimizer": {
                "name": "split",
                "ternary": optimizer,
                "float": {"name": "adamw", "lr": 8e-3, "weight_decay": 0.0},
            },
            "phase": {"lr_schedule": "linear"},
        },
        trials=tuple({"optimizer": {"ternary": setting}} for setting in settings),
        without=_WITHOUT,
    )
