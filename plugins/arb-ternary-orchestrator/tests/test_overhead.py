"""What comparisons may cost."""

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
    # Three candidates of 4 steps: 8 are lost. After s steps the share would be 8 / (8 + s + 4).
    ("most", "first"),
    [(0.4, 8), (0.39, 9), pytest.param(0.2, 28, marks=pytest.mark.slow)],
)
def test_a_comparison_that_would_cost_too_much_is_put_off_and_that_is_told_once(
    most: float, first: int, tiny: Any
) -> None:
    run = tiny.run("run", *tiny.floats, f"phases.0.steps={first + 4}", policy={**COMPARING, "max_overhead": most})
    begun = [each for each in run.decisions if each["not_begun"] is None]
    refused = [each for each in run.decisions if each["not_begun"] is not None]
    assert [(each["step"], each["steps_spent"]) for each in begun] == [(first, 8)]
    assert len(begun[0]["candidates"]) == 3
    if first == 8:
        assert not refused
    else:
        (told,) = refused
        assert (told["step"], told["steps_spent"], told["candidates"]) == (8, 0, [])
        assert told["not_begun"] == f"it would waste 40% of all steps, and max_overhead is {most:.0%}"
    result = json.loads(run.directory.result_file.read_text())
    assert result["phases"][0]["lost_steps"] == 8.0


def test_a_comparison_that_the_run_has_no_steps_left_for_is_not_begun(tiny: Any) -> None:
    run = tiny.run("run", *tiny.floats, "phases.0.steps=11", policy={**COMPARING, "max_overhead": 0.9})
    (told,) = run.decisions
    assert (told["step"], told["not_begun"]) == (8, "that takes 4 steps, and 3 are left")
