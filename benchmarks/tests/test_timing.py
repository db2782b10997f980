"""Turns: variants alternate, rotate among their copies, and are restored untimed."""

from __future__ import annotations

import gc

from harness.timing import Variant, measure


def test_variants_take_turns_among_their_copies() -> None:
    calls: list[tuple[str, int]] = []
    restored: list[int] = []

    def clock(variant: Variant, i: int) -> float:
        assert not gc.isenabled()
        variant.call(i)
        return 1.0 if variant.name == "a" else 2.0

    variants = [
        Variant(name="a", call=lambda i: calls.append(("a", i)), copies=3, restore=restored.append),
        Variant(name="b", call=lambda i: calls.append(("b", i))),
        Variant(name="c", call=lambda i: 0.5, reports_seconds=True),
    ]
    timings = measure(variants, 1e-6, clock)
    assert gc.isenabled()
    assert [timings[name].least for name in "abc"] == [1.0, 2.0, 0.5]
    of_a = [i for name, i in calls if name == "a"]
    assert of_a == restored == [number % 3 for number in range(len(of_a))]
    # Two calls to begin with, then one that does not count and one that does, in three turns.
    assert [name for name, _ in calls] == [*"aabb", *"aabb", *"bbaa", *"aabb"]
