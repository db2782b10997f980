"""Interleaved timing: variants take turns in one process, so that drifting speed affects all."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from attrs import define, field, frozen

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
        rotated_bytes: bytes of one copy of the operands that rotate.
    """

    name: str
    call: Callable[[int], Any]
    copies: int = 1
    restore: Callable[[int], Any] | None = None
    reports_seconds: bool = False
    nbytes: int = 0
    operations: int = 0
    rotated_bytes: int = 0


#: Times one call of a variant on copy ``i``; returns seconds.
Clock = Callable[[Variant, int], float]


def processor_clock(variant: Variant, i: int) -> float:
    """Time a call by the CPU's clock: for calls that have done their work when they return."""
    start = time.perf_counter_ns()
    variant.call(i)
    return (time.perf_counter_ns() - start) * 1e-9


@frozen
class Timing:
    """Seconds per call: the least and the median, and the number of calls."""

    least: float
    median: float
    calls: int


@define
class _State:
    """The timing of one variant so far."""

    variant: Variant
    clock: Clock
    next_copy: int = 0
    samples: list[float] = field(factory=list)

    def once(self) -> float:
        variant = self.variant
        copy = self.next_copy
        self.next_copy = (copy + 1) % variant.copies
        if variant.reports_seconds:
            elapsed = float(variant.call(copy))
        else:
            elapsed = self.clock(variant, copy)
        if variant.restore is not None:
            variant.restore(copy)
        return elapsed

    def timing(self) -> Timing:
        return Timing(min(self.samples), statistics.median(self.samples), len(self.samples))


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
    states = [_State(variant, clock) for variant in variants]
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        estimates = [_warm_up(state, seconds / 10) + spacing for state in states]
        queue = list(zip(states, estimates, strict=True))
        for turn in range(_TURNS):
            for state, estimate in queue:
                if turn >= _LEAST_TURNS and estimate * (turn + 1) > seconds:
                    continue
                time.sleep(_SETTLE)
                state.once()
                calls = max(1, int(seconds / _TURNS / max(estimate, 1e-7)))
                state.samples.extend(state.once() for _ in range(calls))
            queue = queue[1:] + queue[:1]
    finally:
        if was_enabled:
            gc.enable()
    return {state.variant.name: state.timing() for state in states}


def _warm_up(state: _State, seconds: float) -> float:
    """Call a variant untimed; return the least time that a call really took."""
    start = time.perf_counter()
    calls = 0
    least = math.inf
    while calls < 2 or time.perf_counter() - start < seconds:
        least = min(least, state.once())
        calls += 1
    return (time.perf_counter() - start) / calls if state.variant.reports_seconds else least
