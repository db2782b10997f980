"""Stopped runs resume bitwise, wherever they were."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from torch import Tensor

from arb_ternary.errors import CheckpointError, Interrupted
from arb_ternary_orchestrator.bandit import Bandit
from arb_ternary_orchestrator.switching import Strategies
from arb_ternary_train.loop import TrainingLoop

#: Compares after step 8 (to step 12), rolls back after step 18, where the loss explodes, and
#: returns to its strategy after step 26.
BUSY = {
    "decision_interval": 8,
    "hysteresis": 8,
    "eval_horizon": 4,
    "strategies": ["configured", "aggressive_adamw"],
    "safety_strategy": "conservative_adamw",
    "max_overhead": 0.9,
    "snapshot_every": 4,
}
STEPS = "phases.0.steps=32"


@pytest.fixture(autouse=True)
def _exploding(monkeypatch: pytest.MonkeyPatch) -> None:
    loss = TrainingLoop.loss

    def disturbed(self: Any, batch: Any, masked: Any, output: Tensor) -> Tensor:
        value = loss(self, batch, masked, output)
        return value * 10.0 if value.requires_grad and self.microbatches == 18 else value

    monkeypatch.setattr(TrainingLoop, "loss", disturbed)


def test_interrupted_comparison_is_repeated_on_resume(
    tiny: Any, equal: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tiny.run("whole", STEPS, *tiny.floats, policy=BUSY)
    reasons = [(each["step"], each["reason"]) for each in whole.decisions]
    assert reasons == [(8, "periodic"), (18, "safety"), (26, "recovered")]
    # The second microbatch of the second candidate is drawn after 8 steps and the first candidate.
    draw = TrainingLoop.train_step
    drawn = []

    def interrupting(self: Any) -> Any:
        drawn.append(self.microbatches)
        if len(drawn) == 14:
            os.kill(os.getpid(), signal.SIGTERM)
        return draw(self)

    with monkeypatch.context() as patch:
        patch.setattr(TrainingLoop, "train_step", interrupting)
        with pytest.raises(Interrupted, match="SIGTERM after step 8;"):
            tiny.run("stopped", STEPS, *tiny.floats, policy=BUSY)
    assert len(drawn) == 14, "another micro-batch was drawn after the signal"
    resumed = tiny.run("stopped", STEPS, *tiny.floats, policy=BUSY, resume="auto")
    equal(resumed.trained, whole.trained)
    equal(resumed.policy, whole.policy)
    assert resumed.decisions == whole.decisions
    assert resumed.directory.metrics_file.read_bytes() == whole.directory.metrics_file.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_run_stopped_anywhere_resumes_bitwise(
    seed: int, tiny: Any, equal: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tiny.run("whole", STEPS, policy=BUSY)
    draw = TrainingLoop.train_step
    drawn = []

    def interrupting(self: Any) -> Any:
        drawn.append(self.microbatches)
        if len(drawn) % (7 + seed) == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return draw(self)

    monkeypatch.setattr(TrainingLoop, "train_step", interrupting)
    stops = 0
    while True:
        try:
            resumed = tiny.run("run", STEPS, policy=BUSY, resume="auto")
        except Interrupted:
            stops += 1
            assert stops < 100
            # A process has to finish a comparison at some time.
            drawn.clear()
            seed += 3
            continue
        break
    assert stops >= 3
    equal(resumed.trained, whole.trained)
    equal(resumed.policy, whole.policy)
    assert resumed.decisions == whole.decisions
    assert resumed.directory.metrics_file.read_bytes() == whole.directory.metrics_file.read_bytes()


def test_resume_without_a_former_strategy_is_an_error(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The choice is among all strategies that fit; the distribution of one of them is gone."""
    with monkeypatch.context() as patch:
        patch.setattr(
            Strategies,
            "current",
            property(lambda self: "gone", lambda self, name: None),
            raising=False,
        )
        patch.setattr(Bandit, "state_dict", lambda self: {"tried": {**self.tried, "gone": 1}})
        tiny.run(
            "run",
            *tiny.floats,
            "phases.0.steps=8",
            "checkpoint.every=4",
            policy={"eval_horizon": 4},
        )
    run = tiny.folder / "run"
    (run / "result.json").unlink()
    with pytest.raises(
        CheckpointError, match=r"the checkpoint is of the strategies .*gone.*; the config has"
    ):
        tiny.run(
            "run",
            *tiny.floats,
            "phases.0.steps=8",
            "checkpoint.every=4",
            policy={"eval_horizon": 4},
            resume=run,
        )
