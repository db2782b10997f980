"""Interleaved timing: variants take turns in one process, so that drifting speed affects all."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from attrs import frozen

#: Turns that every variant gets, unless its calls are too long for that many.
_TURNS: Final = 8
#: Fewest turns, however long a call takes.
_LEAST_TURNS: Final = 3
#: Seconds of pause before a turn. Threads of another library's pool spin for about a millisecond
#: after its last call, on cores that the next variant needs.
_SETTLE: Final = 3e-3


@frozen(kw_only=True)
class Variant:
    """Something to time.

    Attributes:
        name: unique among the variants of a measurement.
        call: does the work once on copy ``i`` of its operands, ``0 <= i < copies``. The result is
            dropped.
        copies: number of copies of the operands, among which the calls rotate.
        restore: called untimed after each call with the same ``i``; undoes what the call changed.
        reports_seconds: ``call`` returns seconds that it measured itself, as probes do that time
            only a part of their work.
        nbytes: bytes read and written by one call, each operand counted once.
        operations: multiplications and additions of one call; 0 where a rate means nothing.
    """

    name: str
    call: Callable[[int], Any]
    copies: int = 1
    restore: Callable[[int], Any] | None = None
    reports_seconds: bool = False
    nbytes: int = 0
    operations: int = 0


#: Times one call of a variant on copy ``i``; returns seconds.
Clock = Callable[[Variant, int], float]


def processor_clock(variant: Variant, i: int) -> float:
    """Time a call by the CPU's clock: for calls that have done their work when they return."""
    start = time.perf_counter_ns()
    variant.call(i)
    return (time.perf_counter_ns() - start) * 1e-9


@frozen
class Timing:
    """Seconds per call: the least and the median."""

    least: float
    median: float


def measure(
    variants: Sequence[Variant],
    seconds: float,
    clock: Clock = processor_clock,
    *,
    spacing: float = 0.0,
) -> dict[str, Timing]:
    """Time the variants in turns: A B C, B C A, ...

    Every variant is first called until it has run for a tenth of its time or twice, whichever is
    more. Each turn starts with a short pause and one call that does not count. Garbage collection
    is off meanwhile.

    Args:
        variants: with distinct names.
        seconds: about how long each variant is timed; a variant is timed at least three times
            however long it takes.
        clock: times a call.
        spacing: seconds that the clock itself takes per call; they count towards ``seconds``.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return _measure(variants, seconds, clock, spacing)
    finally:
        if was_enabled:
            gc.enable()


def _measure(
    variants: Sequence[Variant], seconds: float, clock: Clock, spacing: float
) -> dict[str, Timing]:
    samples: dict[str, list[float]] = {variant.name: [] for variant in variants}
    counts = dict.fromkeys(samples, 0)

    def once(variant: Variant) -> float:
        copy = counts[variant.name] % variant.copies
        counts[variant.name] += 1
        elapsed = float(variant.call(copy)) if variant.reports_seconds else clock(variant, copy)
        if variant.restore is not None:
            variant.restore(copy)
        return elapsed

    def estimate(variant: Variant) -> float:
        start = time.perf_counter()
        times: list[float] = []
        while len(times) < 2 or time.perf_counter() - start < seconds / 10:
            times.append(once(variant))
        if variant.reports_seconds:
            return (time.perf_counter() - start) / len(times)
        return min(times) + spacing

    queue = [(variant, estimate(variant)) for variant in variants]
    for turn in range(_TURNS):
        for variant, duration in queue:
            if turn < _LEAST_TURNS or duration * (turn + 1) <= seconds:
                time.sleep(_SETTLE)
                once(variant)
                calls = max(1, int(seconds / _TURNS / max(duration, 1e-7)))
                samples[variant.name] += [once(variant) for _ in range(calls)]
        queue = queue[1:] + queue[:1]
    return {name: Timing(min(times), statistics.median(times)) for name, times in samples.items()}
