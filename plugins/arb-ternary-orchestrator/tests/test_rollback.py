"""Rollbacks after an explosion, which skip the data that caused it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from arb_ternary.errors import ArbError
from arb_ternary_orchestrator.policy import Orchestrator
from arb_ternary_train.loop import TrainingLoop

#: Keeps a snapshot every 5 steps, and decides nothing but rollbacks.
GUARDED = {
    "decision_interval": 1000,
    "eval_horizon": 4,
    "hysteresis": 20,
    "snapshot_every": 5,
    "initial_strategy": "configured",
    "safety_strategy": "configured",
}
STEPS = "phases.0.steps=32"


@pytest.fixture
def disturb(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Any], bool], float], None]:
    """Multiplies the loss of the micro-batches that are trained on and for which something
    holds.
    """

    def arrange(when: Callable[[Any], bool], factor: float) -> None:
        loss = TrainingLoop.loss

        def disturbed(self: Any, batch: Any, masked: Any, output: Tensor) -> Tensor:
            value = loss(self, batch, masked, output)
            return value * factor if value.requires_grad and when(self) else value

        monkeypatch.setattr(TrainingLoop, "loss", disturbed)

    return arrange


def restore_by_hand(monkeypatch: pytest.MonkeyPatch, *, saved_at: int, restored_after: int) -> None:
    """A loop without orchestrator whose weights and optimizer are put back as a script with PyTorch
    would do it.
    """
    whole = TrainingLoop.train_microbatch
    kept: dict[str, Any] = {}

    def train(self: Any) -> Any:
        if self.step == saved_at and not kept:
            kept.update(model=self.model.state_dict(), optimizer=self.optimizer.state_dict())
            kept.update(copy.deepcopy(kept))
        report = whole(self)
        if self.microbatches == restored_after:
            self.model.load_state_dict(kept["model"])
            self.optimizer.load_state_dict(copy.deepcopy(kept["optimizer"]))
        return report

    monkeypatch.setattr(TrainingLoop, "train_microbatch", train)


def test_rollback_restores_state_and_skips_the_data(
    tiny: Any, equal: Any, disturb: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    disturb(lambda loop: loop.microbatches == 23, 10.0)
    run = tiny.run("run", STEPS, policy=GUARDED)
    with monkeypatch.context() as patch:
        restore_by_hand(patch, saved_at=20, restored_after=23)
        by_hand = tiny.run("by hand", STEPS)
    (decision,) = run.decisions
    assert (decision["reason"], decision["step"], decision["rolled_back_to"]) == ("safety", 23, 20)
    equal(run.trained, by_hand.trained)
    assert run.steps == by_hand.steps


@pytest.mark.parametrize(
    ("bad", "accumulated"),
    [
        (range(23, 24), 1),
        pytest.param(range(23, 29), 1, marks=pytest.mark.slow),
        (range(23, 24), 2),
    ],
    ids=["one", "several in a row", "one within a step"],
)
def test_batch_without_finite_loss_is_passed_over(
    bad: range, accumulated: int, tiny: Any, equal: Any, disturb: Any
) -> None:
    """It has changed nothing, so the run has the bits of one without the orchestrator."""
    disturb(lambda loop: loop.microbatches in bad, math.nan)
    steps = (STEPS, f"phases.0.gradient_accumulation_steps={accumulated}")
    run = tiny.run("run", *steps, policy={**GUARDED, "safety_strategy": "spike_resistant"})
    plain = tiny.run("plain", *steps)
    assert run.decisions == []
    equal(run.trained, plain.trained)
    assert run.steps == plain.steps
    skipped = [record["micro_batch"] for record in run.metrics if record["event"] == "skip"]
    assert skipped == list(bad)


def test_run_survives_nan_weights(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = TrainingLoop.train_step

    def ruined(self: Any) -> Any:
        drawn = draw(self)
        if self.microbatches == 22:
            with torch.no_grad():
                next(self.model.parameters()).fill_(math.nan)
        return drawn

    monkeypatch.setattr(TrainingLoop, "train_step", ruined)
    run = tiny.run(
        "run", STEPS, *tiny.floats, policy={**GUARDED, "safety_strategy": "spike_resistant"}
    )
    (decision,) = run.decisions
    assert (decision["from"], decision["to"], decision["rolled_back_to"]) == (
        "configured",
        "spike_resistant",
        20,
    )
    assert (decision["metric"], decision["value"]) == ("loss", "nan")
    last = run.steps[-1]
    assert last["step"] == 32
    assert math.isfinite(last["loss"])
    assert all(bool(torch.isfinite(tensor).all()) for tensor in run.last.model.values())
    # The telemetry has the steps before the restored state and after the rollback, up to step 32.
    telemetry = run.policy["monitor"]["telemetry"]
    assert telemetry["step"] == 32
    assert [step for step, _ in telemetry["points"]] == [*range(1, 21), *range(23, 33)]


def test_bad_snapshot_is_skipped(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = TrainingLoop.train_step

    def ruined(self: Any) -> Any:
        drawn = draw(self)
        # The loss of step 20 is still good, so its snapshot is kept.
        if self.microbatches == 20:
            with torch.no_grad():
                next(self.model.parameters()).fill_(math.nan)
        return drawn

    monkeypatch.setattr(TrainingLoop, "train_step", ruined)
    (decision,) = tiny.run("run", STEPS, *tiny.floats, policy=GUARDED).decisions
    assert (decision["step"], decision["rolled_back_to"]) == (20, 15)


@pytest.mark.parametrize(
    ("second", "hysteresis", "goes_to"),
    [(28, 20, 15), (28, 3, 20), (24, 20, 20)],
    ids=["soon", "later", "the very next batch"],
)
def test_second_explosion_rolls_back_further(
    second: int, hysteresis: int, goes_to: int, tiny: Any, disturb: Any
) -> None:
    disturb(lambda loop: loop.microbatches in (23, second), 10.0)
    run = tiny.run("run", STEPS, *tiny.floats, policy={**GUARDED, "hysteresis": hysteresis})
    assert [(each["step"], each["rolled_back_to"]) for each in run.decisions] == [
        (23, 20),
        (second, goes_to),
    ]


def test_several_bad_batches_roll_back_to_one_snapshot(tiny: Any, disturb: Any) -> None:
    disturb(lambda loop: 23 <= loop.microbatches < 29, 10.0)
    run = tiny.run("run", STEPS, *tiny.floats, policy=GUARDED)
    assert [each["rolled_back_to"] for each in run.decisions] == [20] * 6


def test_lastingly_higher_loss_is_accepted(tiny: Any, disturb: Any) -> None:
    disturb(lambda loop: loop.microbatches >= 16, 10.0)
    run = tiny.run("run", STEPS, *tiny.floats, "phases.0.max_skipped=4", policy=GUARDED)
    # After four rollbacks the loss of the fifth batch is accepted.
    assert [each["rolled_back_to"] for each in run.decisions] == [15, 15, 15, 15, None]
    assert run.decisions[-1]["step"] == 20
    assert run.decisions[-1]["not_begun"].startswith("4 batches in a row have such a loss")


def test_run_without_finite_losses_ends_with_the_reason(tiny: Any, disturb: Any) -> None:
    disturb(lambda loop: loop.microbatches >= 12, math.nan)
    with pytest.raises(
        ArbError, match="step 12: 7 micro-batches in a row had no finite loss; the last was nan"
    ):
        tiny.run("run", STEPS, *tiny.floats, "phases.0.max_skipped=7", policy=GUARDED)


def test_run_without_finite_gradients_ends_with_the_reason(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before_step = Orchestrator.before_step

    def overflowing(self: Orchestrator, loop: TrainingLoop) -> None:
        if loop.microbatches >= 12:
            gradients = [p.grad for p in loop.model.parameters() if p.grad is not None]
            gradients[0].fill_(math.inf)
        before_step(self, loop)

    monkeypatch.setattr(Orchestrator, "before_step", overflowing)
    message = "step 12: 3 micro-batches in a row had no finite gradient; the last was inf"
    with pytest.raises(ArbError, match=message):
        tiny.run("run", STEPS, *tiny.floats, "phases.0.max_skipped=3", policy=GUARDED)
