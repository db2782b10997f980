"""The phases of a run that upcycles: those that make the student, and those that are made of its
trained weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

#: The phases before training, in order.
PREPARING: Final = ("load_teacher", "fold_rotate", "surgery", "projection")
# : What trains the ternary weights of a student, which knows something already: votes at a seventh
# of the rate of : training from random weights. With 0.05 a student of 135 million parameters was
# lost after 80 steps.
VOTES: Final[Mapping[str, Any]] = {"name": "scaled_votes", "lr": 0.015}
# : Tokens of a sample of the calibration text, where the model can take as many: the defaults of
# the phases.
_SAMPLES: Final[Mapping[str, int]] = {"surgery": 256, "projection": 128}


def preparing(
    teacher: str, model: Mapping[str, Any], max_length: int, options: Mapping[str, Any]
) -> list[Any]:
    """``load_teacher``, ``fold_rotate``, for decoupled attention ``surgery``, and ``projection``.

    Args:
        teacher: what ``load_teacher`` reads.
        model: the student's section.
        max_length: of the student.
        options: of each phase, by its name.
    """
    decoupled = model.get("attention") == "decoupled"
    shorter = {
        name: {"block_size": max_length} if max_length < size else {}
        for name, size in _SAMPLES.items()
    }
    phases: list[dict[str, Any]] = [
        {"name": "load_teacher", "teacher": teacher},
        {"name": "fold_rotate"},
        *([{"name": "surgery", **shorter["surgery"]}] if decoupled else []),
        {"name": "projection", **shorter["projection"]},
    ]
    return [{**phase, **options.get(phase["name"], {})} for phase in phases]


def ending(benchmark: Mapping[str, Any] | None, export: Mapping[str, Any] | None) -> list[Any]:
    """The phases ``benchmark`` and ``export``, where they have options."""
    chosen = {"benchmark": benchmark, "export": export}
    return [{"name": name, **options} for name, options in chosen.items() if options is not None]
