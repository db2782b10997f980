"""The bench's own recipes: float32 as the bound that every rule is measured against, and plain sign votes."""

from __future__ import annotations

from itertools import product
from typing import Final

from arb_ternary.run.quality.protocol import Recipe

__all__ = ["float32", "scaled_votes", "sign_votes_3", "sign_votes_8", "sign_votes_32"]

#: Learning rates of the float parts beside ternary linears, and rates at the last step, in every combination.
_RATES: Final = (4e-3, 8e-3)
_FLOORS: Final = (0.05, 0.1)


def float32(steps: int) -> Recipe:
    """Every part in float32, activations included, trained by AdamW."""
    return Recipe(
        overrides={
            "model": {"float_parts": ["embedding", "head", "norms", "linears"], "activations": "float"},
            "optimizer": {"name": "adamw"},
        },
        trials=tuple({"optimizer": {"lr": lr}} for lr in (1e-3, 2e-3, 4e-3, 8e-3)),
        without=("model.group_size", "model.scale_rule"),
    )


def scaled_votes(steps: int) -> Recipe:
    """The default rule."""
    return Recipe(
        overrides={
            "optimizer": {
                "name": "split",
                "ternary": {"name": "scaled_votes"},
                "float": {"name": "adamw", "lr": 8e-3, "weight_decay": 0.0},
            },
            "phase": {"lr_schedule": "linear"},
        },
        trials=tuple({"optimizer": {"ternary": {"lr": lr}}} for lr in (0.1, 0.15, 0.2, 0.3)),
    )


def sign_votes_3(steps: int) -> Recipe:
    """Sign votes with a threshold of 3."""
    return _sign_votes(3)


def sign_votes_8(steps: int) -> Recipe:
    """Sign votes with a threshold of 8."""
    return _sign_votes(8)


def sign_votes_32(steps: int) -> Recipe:
    """Sign votes with a threshold of 32."""
    return _sign_votes(32)


def _sign_votes(threshold: int) -> Recipe:
    return Recipe(
        overrides={
            "optimizer": {
                "name": "split",
                "ternary": {"name": "sign_votes", "accum_threshold": threshold},
                "float": {"name": "adamw"},
            }
        },
        trials=tuple(
            {"optimizer": {"float": {"lr": lr}}, "phase": {"min_rate": floor}} for lr, floor in product(_RATES, _FLOORS)
        ),
    )
