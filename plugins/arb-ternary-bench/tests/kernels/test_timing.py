"""Turns, rotation, and the figures of a variant."""

from __future__ import annotations

import gc
import itertools
import time

import pytest

from arb_ternary_bench.kernels.timing import Variant, measure


def test_variants_take_turns() -> None:
    calls: list[str] = []
    variants = [
        Variant(name=name, call=lambda _, name=name: calls.append(name)) for name in ("a", "b")
    ]

    def clock(variant: Variant, i: int) -> float:
        variant.call(i)
        return 2e-4

    measure(variants, 0.01, clock)
    changes = sum(one != other for one, other in itertools.pairwise(calls))
    assert changes >= 8  # in blocks one after the other there would be one change


def test_calls_rotate_through_every_copy_in_order() -> None:
    copies: list[int] = []
    measure([Variant(name="a", call=copies.append, copies=3)], 1e-4)
    assert copies == [i % 3 for i in range(len(copies))]
    assert len(copies) > 3


def test_what_a_call_changes_is_put_back_and_not_timed() -> None:
    state = [0, 0]
    now = 0.0

    def call(i: int) -> None:
        nonlocal now
        assert state[i] == 0
        state[i] = 1
        now += 0.25

    def restore(i: int) -> None:
        nonlocal now
        state[i] = 0
        now += 1.0

    def clock(variant: Variant, i: int) -> float:
        start = now
        variant.call(i)
        return now - start

    timing = measure([Variant(name="a", call=call, restore=restore, copies=2)], 0.01, clock)["a"]
    assert timing.least == timing.median == 0.25


def test_least_and_median_are_those_of_the_calls() -> None:
    seconds = iter([9.0, 9.0] + [9.0, 3.0] * 2 + [9.0, 1.0])
    timing = measure([Variant(name="a", call=lambda _: next(seconds), reports_seconds=True)], 1e-9)[
        "a"
    ]
    assert (timing.least, timing.median, timing.calls) == (1.0, 3.0, 3)


def test_slow_call_with_short_reported_time_is_not_repeated_more() -> None:
    def probe(_: int) -> float:
        time.sleep(0.002)
        return 1e-12

    assert (
        measure([Variant(name="a", call=probe, reports_seconds=True)], 0.05)["a"].calls
        <= 0.05 / 0.002
    )


def test_a_call_longer_than_its_time_is_still_timed_three_times() -> None:
    assert measure([Variant(name="a", call=lambda _: time.sleep(0.003))], 1e-6)["a"].calls == 3


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_left_as_it_was(enabled: bool) -> None:
    before = gc.isenabled()
    try:
        gc.enable() if enabled else gc.disable()
        seen: list[bool] = []
        measure([Variant(name="a", call=lambda _: seen.append(gc.isenabled()))], 1e-5)
        assert not any(seen)
        assert gc.isenabled() is enabled
    finally:
        gc.enable() if before else gc.disable()
