"""Limits on the cost of comparisons."""

from __future__ import annotations

import json
from typing import Any

import pytest

COMPARING = {
    "decision_interval": 8,
    "hysteresis": 8,
    "eval_horizon": 4,
    "strategies": ["aggressive_adamw"],
    "snapshot_every": 50,
    "probe_batches": 0,
}


@pytest.mark.parametrize(
    # Three candidates of 4 steps: 8 are lost in each comparison. Of 32 steps and n comparisons: 8 n
    # / (8 n + 32).
    ("most", "first", "share"),
    [(0.2, 1, "33%"), pytest.param(0.19, 0, "20%", marks=pytest.mark.slow), (0.34, 2, "")],
)
def test_expensive_comparisons_are_skipped_and_reported_once(
    most: float, first: int, share: str, tiny: Any
) -> None:
    run = tiny.run(
        "run", *tiny.floats, "phases.0.steps=32", policy={**COMPARING, "max_overhead": most}
    )
    begun = [each for each in run.decisions if each["not_begun"] is None]
    refused = [each for each in run.decisions if "waste" in (each["not_begun"] or "")]
    assert [each["steps_spent"] for each in begun] == [8] * first
    assert [len(each["candidates"]) for each in begun] == [3] * first
    assert [each["not_begun"] for each in refused] == (
        [f"it would waste {share} of all steps, and max_overhead is {most:.0%}"] if share else []
    )
    assert all((each["steps_spent"], each["candidates"]) == (0, []) for each in refused)
    result = json.loads(run.directory.result_file.read_text())
    assert result["phases"][0]["lost_steps"] == 8.0 * first


def test_overhead_counts_steps_of_several_microbatches(tiny: Any) -> None:
    """A step takes three microbatches, so a trial of four steps takes twelve."""
    pytest.importorskip("arb_ternary_gqc")
    wrapped = "optimizer={name: gqc.gnts, threshold: 1e-6, max_batch_draws: 3, inner: adamw}"
    run = tiny.run(
        "run",
        tiny.floats[0],
        wrapped,
        "phases.0.steps=24",
        policy={**COMPARING, "max_overhead": 0.25},
    )
    # 8 steps are lost, of 32.
    first = run.decisions[0]
    assert (first["not_begun"], first["steps_spent"]) == (None, 8)
    assert [each["steps"] for each in first["candidates"]] == [4, 4, 4]


def test_comparison_needs_enough_steps_left(tiny: Any) -> None:
    run = tiny.run(
        "run", *tiny.floats, "phases.0.steps=11", policy={**COMPARING, "max_overhead": 0.9}
    )
    (told,) = run.decisions
    assert (told["step"], told["not_begun"]) == (8, "that may take 4 steps, and 3 are left")
