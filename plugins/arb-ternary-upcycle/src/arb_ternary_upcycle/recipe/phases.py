"""The phases of a run that upcycles, before and after those that train."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

#: The phases before training, in order.
PREPARING: Final = ("load_teacher", "fold_rotate", "surgery", "projection")
#: Optimizer of the ternary weights of a student, which starts trained: its rate is a seventh of
#: that of training from random weights. With 0.05 a student of 135 million parameters diverged
#: within 80 steps.
VOTES: Final[Mapping[str, Any]] = {"name": "scaled_votes", "lr": 0.015}
#: Default ``block_size`` of the phases that read calibration text.
_BLOCK_SIZES: Final[Mapping[str, int]] = {"surgery": 256, "projection": 128}


def preparing(
    teacher: str, model: Mapping[str, Any], max_length: int, options: Mapping[str, Any]
) -> list[Any]:
    """Return the phases that make a student; ``surgery`` only for decoupled attention.

    Args:
        teacher: what ``load_teacher`` reads.
        model: the student's section.
        max_length: of the student.
        options: options of each phase, by its name.
    """
    phases = []
    for name in PREPARING:
        if name == "surgery" and model.get("attention") != "decoupled":
            continue
        phase: dict[str, Any] = {"name": name}
        if name == "load_teacher":
            phase["teacher"] = teacher
        if max_length < _BLOCK_SIZES.get(name, 0):
            phase["block_size"] = max_length
        phases.append({**phase, **options.get(name, {})})
    return phases


def ending(benchmark: Mapping[str, Any] | None, export: Mapping[str, Any] | None) -> list[Any]:
    """Return the phases ``benchmark`` and ``export``, if they have options."""
    chosen = {"benchmark": benchmark, "export": export}
    return [{"name": name, **options} for name, options in chosen.items() if options is not None]
