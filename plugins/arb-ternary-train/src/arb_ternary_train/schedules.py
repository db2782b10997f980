"""Learning-rate schedules as pure functions of the step: nothing to store, exact after a resume.

With ``w`` warm-up steps and ``n`` steps in all, step ``t`` (from 0) uses ``peak * (t + 1) / w``
while ``t < w``: the last warm-up step is at the peak. From ``t = w`` on, with ``p = (t - w) / (n -
1 - w)`` in [0, 1]:

* ``constant``: ``peak``
* ``linear``: ``peak + (floor - peak) * p``
* ``sqrt``: ``peak + (floor - peak) * sqrt(p)``
* ``cosine``: ``floor + (peak - floor) * (1 + cos(pi * p)) / 2``
* ``two_stage``: ``linear`` while ``t < m``, where ``m = max(w, ceil(n / 2))``; from there on a line
  from ``h = max(floor, 2/3 linear(m))`` at step ``m`` to the floor: ``h + (floor - h) * (t - m) /
  (n - 1 - m)``

so that step ``w`` is at the peak (of ``two_stage`` when ``w < m``) and the last step, ``n - 1``, at
the floor. ``none`` leaves every rate alone. ``two_stage`` is the recipe of Microsoft, "The Era of
1-bit LLMs: Training Tips, Code and FAQ", 2024: half-way the rate drops to two thirds of its line;
with a floor of 0 it is ``2/3 linear(t)`` from then on. ``sqrt`` is the cool-down "1-sqrt" of Hägele
et al., "Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations", 2024, here over
the whole run: fast at first, slow in the end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, Literal

from arb_ternary.optim.protocol import inner_optimizers

if TYPE_CHECKING:
    from torch.optim import Optimizer

ScheduleName = Literal["cosine", "linear", "sqrt", "two_stage", "constant", "none"]
SCHEDULES: Final[tuple[ScheduleName, ...]] = (
    "cosine",
    "linear",
    "sqrt",
    "two_stage",
    "constant",
    "none",
)

# : Entry of a group: what a rate that is given for all parts is multiplied by for its own; 1 where
# there is none.
RATE_FACTOR: Final = "rate_factor"


def scheduled_value(
    kind: ScheduleName, step: int, *, steps: int, warmup: int, peak: float, floor: float
) -> float:
    """The rate of step ``step`` (0-based) of ``steps``; ``none`` gives the peak."""
    if kind == "none":
        return peak
    if step < warmup:
        return peak * (step + 1) / warmup
    if kind == "constant":
        return peak
    if kind == "two_stage" and step >= (middle := max(warmup, (steps + 1) // 2)):
        line = peak + (floor - peak) * _share(middle, warmup, steps - 1)
        start = max(floor, line * 2.0 / 3.0)
        return start + (floor - start) * _share(step, middle, steps - 1)
    progress = _share(step, warmup, steps - 1)
    if kind == "sqrt":
        return peak + (floor - peak) * math.sqrt(progress)
    if kind in ("linear", "two_stage"):
        return peak + (floor - peak) * progress
    return floor + (peak - floor) * (1.0 + math.cos(math.pi * progress)) / 2.0


def _share(step: int, first: int, last: int) -> float:
    """How far ``step`` is on the way from ``first`` to ``last``."""
    return min(1.0, (step - first) / max(1, last - first))


def scheduled_groups(optimizer: Optimizer) -> Iterator[dict[str, Any]]:
    """The parameter groups whose rate a phase schedules, each once: those with ``kind`` ``float``
    or ``ternary``.

    A group without a ``kind`` is of a plain torch optimizer and counts as float. Groups of other
    kinds belong to a wrapper, which schedules them itself.
    """
    seen: set[int] = set()
    for part in inner_optimizers(optimizer):
        for group in part.param_groups:
            if group.get("kind", "float") in ("float", "ternary") and id(group) not in seen:
                seen.add(id(group))
                yield group


def apply_schedule(
    optimizer: Optimizer,
    kind: ScheduleName,
    step: int,
    *,
    steps: int,
    warmup: int,
    lr: float | None,
    min_lr: float | None,
    min_rate: float,
) -> dict[str, float]:
    """Set the rate of every scheduled group for step ``step`` and return the first of each kind.

    The peak of a float group is ``lr``, or its own initial rate where ``lr`` is None, and its floor
    ``min_lr``, or ``min_rate`` times the peak; ``lr`` and ``min_lr`` times the group's
    ``rate_factor``, which its own rate has in it. A ternary group goes from its own initial rate to
    ``min_rate`` times that. A group's initial rate is kept in it as ``initial_lr``, as torch's
    schedulers do, and so is part of the optimizer's state.
    """
    rates: dict[str, float] = {}
    for group in scheduled_groups(optimizer):
        is_float = group.get("kind", "float") == "float"
        base = float(group.setdefault("initial_lr", group["lr"]))
        factor = group.get(RATE_FACTOR, 1.0)
        peak = lr * factor if is_float and lr is not None else base
        floor = min_lr * factor if is_float and min_lr is not None else peak * min_rate
        if kind != "none" or (is_float and lr is not None):
            group["lr"] = scheduled_value(
                kind, step, steps=steps, warmup=warmup, peak=peak, floor=floor
            )
        rates.setdefault("lr" if is_float else "rate", float(group["lr"]))
    return rates
