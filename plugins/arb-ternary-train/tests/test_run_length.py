"""Runs that are shorter than their warm-up, and runs that are made longer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from arb_ternary.errors import CheckpointError
from arb_ternary_train.schedules import scheduled_value


def test_a_warmup_longer_than_the_run_ends_with_it(tiny: Any) -> None:
    rates = [
        scheduled_value("cosine", step, steps=4, warmup=100, peak=1.0, floor=0.0)
        for step in range(4)
    ]
    assert rates == [0.25, 0.5, 0.75, 1.0]
    run, report = tiny.run("short", "phases.0.steps=4", "phases.0.warmup_steps=100")
    assert report.steps == 4
    said = run.log_file.read_text()
    assert "warmup_steps: 100 is more than the 4 steps; rates rise to their peak until" in said


@pytest.mark.parametrize(
    ("settings", "short"),
    [
        (("phases.0.lr_schedule=constant", "phases.0.eval_every=2"), 4),
        (("phases.0.lr_schedule=constant", "phases.0.eval_every=2"), 3),
        (("phases.0.lr_schedule=cosine", "phases.0.warmup_steps=3"), 3),
    ],
    ids=["ends with an evaluation", "ends between", "warm-up only"],
)
def test_a_longer_run_has_the_bytes_of_one_that_was_never_short(
    tiny: Any, files_in: Any, settings: tuple[str, ...], short: int
) -> None:
    kept = (*settings, "checkpoint.keep=1")
    whole, _ = tiny.run("whole", *kept, "phases.0.steps=7")
    run, report = tiny.run("short", *kept, f"phases.0.steps={short}")
    assert report.steps == short
    _, report = tiny.run("short", *kept, "phases.0.steps=7", resume="auto")
    assert report.steps == 7
    final = ("metrics.jsonl", "checkpoints/step-00000007/*")
    assert files_in(run.path, final) == files_in(whole.path, final)
    assert f"continuing to step 7 instead of {short}" in run.log_file.read_text()

    # Its own config resumes it, and the result of the shorter run is kept.
    assert "steps: 7\n" in run.config_file.read_text()
    assert json.loads((run.path / "result.before.json").read_text())["steps"] == short
    assert json.loads(run.result_file.read_text())["steps"] == 7


@pytest.mark.parametrize(
    ("settings", "steps", "reason"),
    [
        (("phases.0.lr_schedule=cosine",), 8, "lr_schedule 'cosine' is stretched over all steps"),
        (
            ("phases.0.lr_schedule=constant", "phases.0.batch_doublings=[0.5]"),
            16,
            "batch_doublings is stretched over all steps, and differs from step 3 on",
        ),
        (("phases.0.lr_schedule=constant",), 3, "4 steps are done"),
    ],
)
def test_a_run_whose_steps_depend_on_its_length_keeps_it(
    tiny: Any, files_in: Any, settings: tuple[str, ...], steps: int, reason: str
) -> None:
    settings = (*settings, "phases.0.warmup_steps=0")
    run, _ = tiny.run("run", *settings, "phases.0.steps=4")
    everything = ("*", "checkpoints/*/*")
    before = files_in(run.path, everything)
    with pytest.raises(CheckpointError) as refused:
        tiny.run("run", *settings, f"phases.0.steps={steps}", resume="auto")
    assert f"phases[0].steps: 4 there, {steps} here" in refused.value.hint
    assert reason in refused.value.hint
    assert files_in(run.path, everything) == before
