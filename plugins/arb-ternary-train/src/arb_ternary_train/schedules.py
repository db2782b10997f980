"""Learning-rate schedules: pure functions of the step, so nothing is stored.

With ``w`` warm-up steps, step ``t`` (from 0) has the rate ``peak * (t + 1) / w`` while ``t < w``:
the last warm-up step is at the peak. From step ``w`` on the schedule decides: step ``w`` is at the
peak and the last step at the floor. (``two_stage`` is at the peak in step ``w`` only if the warm-up
ends in the first half.)

To add a schedule, write a function like :func:`linear`, and add its name to ``ScheduleName`` and
the function to ``_DECAYS``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from attrs import frozen

from arb_ternary.optim.protocol import inner_optimizers

if TYPE_CHECKING:
    from torch.optim import Optimizer

#: The last one sets no rates.
ScheduleName = Literal["cosine", "linear", "sqrt", "two_stage", "constant", "none"]
SCHEDULES: Final[tuple[ScheduleName, ...]] = get_args(ScheduleName)

#: Entry of a param group: factor on a rate that is given for all parts; 1 if the entry is absent.
RATE_FACTOR: Final = "rate_factor"


@frozen
class Span:
    """The steps and rates between which a schedule goes.

    Attributes:
        first: first step after the warm-up.
        last: last step.
        peak: rate of the first step.
        floor: rate of the last step.
    """

    first: int
    last: int
    peak: float
    floor: float

    def progress(self, step: int) -> float:
        """Return how far ``step`` is on the way from ``first`` to ``last``, in [0, 1]."""
        return _share(step, self.first, self.last)


def constant(step: int, span: Span) -> float:
    """Stay at the peak."""
    return span.peak


def linear(step: int, span: Span) -> float:
    """Fall on a line."""
    return span.peak + (span.floor - span.peak) * span.progress(step)


def sqrt(step: int, span: Span) -> float:
    """Fall with the square root of the progress: fast at first, slow in the end.

    This is the cool-down "1-sqrt" of Hägele et al., "Scaling Laws and Compute-Optimal Training
    Beyond Fixed Training Durations", 2024, over the whole run.
    """
    return span.peak + (span.floor - span.peak) * math.sqrt(span.progress(step))


def cosine(step: int, span: Span) -> float:
    """Fall on half a period of a cosine."""
    height = 1.0 + math.cos(math.pi * span.progress(step))
    return span.floor + (span.peak - span.floor) * height / 2.0


def two_stage(step: int, span: Span) -> float:
    """Fall on a line, drop to two thirds of it half-way, and fall on a line to the floor.

    The second line begins at ``max(floor, 2/3 linear(m))`` in step ``m = max(first, ceil(n / 2))``
    of ``n``. This is the recipe of Microsoft, "The Era of 1-bit LLMs: Training Tips, Code and FAQ",
    2024; with a floor of 0 the rate is two thirds of ``linear`` from step ``m`` on.
    """
    steps = span.last + 1
    middle = max(span.first, (steps + 1) // 2)
    if step < middle:
        return linear(step, span)
    start = max(span.floor, linear(middle, span) * 2.0 / 3.0)
    return start + (span.floor - start) * _share(step, middle, span.last)


#: The rate of a step after the warm-up, by the name of the schedule. ``none`` sets no rates.
_DECAYS: Final[Mapping[ScheduleName, Callable[[int, Span], float]]] = {
    "cosine": cosine,
    "linear": linear,
    "sqrt": sqrt,
    "two_stage": two_stage,
    "constant": constant,
}


def scheduled_value(
    kind: ScheduleName, step: int, *, steps: int, warmup: int, peak: float, floor: float
) -> float:
    """Return the rate of step ``step`` (from 0) of ``steps``; the peak for ``none``.

    A warm-up that is longer than the run ends with it.
    """
    warmup = min(warmup, steps)
    if kind == "none":
        return peak
    if step < warmup:
        return peak * (step + 1) / warmup
    return _DECAYS[kind](step, Span(warmup, steps - 1, peak, floor))


def _share(step: int, first: int, last: int) -> float:
    """Return how far ``step`` is on the way from ``first`` to ``last``, at most 1."""
    return min(1.0, (step - first) / max(1, last - first))


def scheduled_groups(optimizer: Optimizer) -> Iterator[dict[str, Any]]:
    """Yield the param groups whose rate a phase schedules, each once.

    These are groups with ``kind`` ``float`` or ``ternary``. A group without ``kind`` belongs to a
    plain torch optimizer and counts as float. Groups of other kinds belong to a wrapper, which
    schedules them itself.
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
    """Set the rate of every scheduled group for step ``step``.

    The peak of a float group is ``lr``, or its own initial rate if ``lr`` is None. Its floor is
    ``min_lr``, or ``min_rate`` times the peak. ``lr`` and ``min_lr`` are multiplied by the group's
    ``rate_factor``, which its initial rate includes already. A ternary group goes from its own
    initial rate to ``min_rate`` times that. The initial rate of a group is stored in it as
    ``initial_lr``, as by torch's schedulers, and so is part of the optimizer's state.

    Returns:
        The rate of the first group of each kind: ``lr`` (float) and ``rate`` (ternary).
    """
    rates: dict[str, float] = {}
    for group in scheduled_groups(optimizer):
        is_float = group.get("kind", "float") == "float"
        factor = group.get(RATE_FACTOR, 1.0)
        peak = float(group.setdefault("initial_lr", group["lr"]))
        sets_rate = kind != "none"
        if is_float and lr is not None:
            peak = lr * factor
            sets_rate = True
        floor = peak * min_rate
        if is_float and min_lr is not None:
            floor = min_lr * factor
        if sets_rate:
            group["lr"] = scheduled_value(
                kind, step, steps=steps, warmup=warmup, peak=peak, floor=floor
            )
        rates.setdefault("lr" if is_float else "rate", float(group["lr"]))
    return rates
