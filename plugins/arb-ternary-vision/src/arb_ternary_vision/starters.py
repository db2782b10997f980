"""Configs that ``arb config new`` writes with their options explained."""

from __future__ import annotations

from typing import Any, Final

#: A pure-ternary classifier of handwritten digits.
DIGITS: Final[dict[str, Any]] = {
    "name": "digits",
    "data": {"name": "digits"},
    "masking": {"name": "labels"},
    "model": {
        "name": "convnet",
        "image_size": 8,
        "width": 16,
        "stages": 2,
        "layers": 1,
        "group_size": "row",
        "scale_rule": "frozen",
    },
    "optimizer": {"name": "scaled_votes", "lr": 0.4},
    "phases": [
        {
            "name": "standard",
            "steps": 400,
            "batch_size": 32,
            "lr_schedule": "linear",
            "warmup_steps": 20,
            "eval_every": 100,
            "eval_batches": None,
        }
    ],
    "trackers": [{"name": "confusion_matrix"}],
    "checks": ["pure"],
}
