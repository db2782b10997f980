"""Recipes of the quality bench: each rule with four settings to choose from."""

from __future__ import annotations

from arb_ternary.run.quality.protocol import Recipe

__all__ = ["momentum_votes"]


def momentum_votes(steps: int) -> Recipe:
    """Accumulators as momentum. The share of flips falls with the square of the rate, as that of scaled votes does."""
    return Recipe(
        overrides={
            "optimizer": {
                "name": "split",
                "ternary": {"name": "momentum_votes", "power": 2.0},
                "float": {"name": "adamw", "lr": 8e-3, "weight_decay": 0.0},
            },
            "phase": {"lr_schedule": "linear"},
        },
        trials=tuple(
            {"optimizer": {"ternary": {"flip_rate": flip_rate, "decay": decay}}}
            for flip_rate, decay in ((0.005, 0.05), (0.01, 0.05), (0.02, 0.05), (0.01, 0.02))
        ),
    )
