"""After a rollback: when the strategy that was interrupted goes on, and when it does not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from torch import Tensor

from arb_ternary_orchestrator.rollback import Recovery
from arb_ternary_train.loop import TrainingLoop

GUARDED = {
    "decision_interval": 1000,
    "eval_horizon": 4,
    "hysteresis": 8,
    "snapshot_every": 5,
    "safety_strategy": "spike_resistant",
}


def test_the_interrupted_strategy_goes_on_after_calm_steps_once() -> None:
    recovery = Recovery(calm=8)
    assert recovery.due(100) is None
    recovery.rolled_back(10, "bold", "safe", blameless=False)
    assert [step for step in range(10, 22) if recovery.due(step)] == [18, 19, 20, 21]
    recovery.rolled_back(11, "safe", "safe", blameless=True)  # the data were bad for two steps
    assert [step for step in range(11, 20) if recovery.due(step)] == [16, 17, 18, 19]
    recovery = restored(recovery)
    assert (recovery.due(15), recovery.due(16)) == (None, "bold")
    recovery.returned("bold")
    assert recovery.due(30) is None
    recovery.rolled_back(40, "bold", "safe", blameless=False)
    assert restored(recovery).due(90) is None, "it exploded again"
    recovery.rolled_back(50, "other", "safe", blameless=False)
    assert recovery.due(58) == "other"
    recovery.settled()
    assert recovery.due(60) is None


def restored(recovery: Recovery) -> Recovery:
    """What a resumed run has of it."""
    other = Recovery(calm=8)
    other.load_state_dict(json.loads(json.dumps(recovery.state_dict())))
    return other


@pytest.mark.parametrize(
    ("exploding", "story"),
    [
        ((12, 13), [(12, "spike_resistant"), (13, "spike_resistant"), (18, "configured")]),
        ((12, 24), [(12, "spike_resistant"), (20, "configured"), (24, "spike_resistant")]),
    ],
    ids=["the data were bad", "it explodes again"],
)
def test_a_run_goes_back_to_the_strategy_that_bad_data_interrupted(
    exploding: tuple[int, ...], story: list[tuple[int, str]], tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss = TrainingLoop.loss

    def disturbed(self: Any, batch: Any, masked: Any, output: Tensor) -> Tensor:
        value = loss(self, batch, masked, output)
        return value * 10.0 if value.requires_grad and self.micro_batches in exploding else value

    monkeypatch.setattr(TrainingLoop, "loss", disturbed)
    run = tiny.run("run", "phases.0.steps=36", *tiny.floats, policy=GUARDED)
    assert [(each["step"], each["to"]) for each in run.decisions] == story
    reasons = {"spike_resistant": "safety", "configured": "recovered"}
    assert [each["reason"] for each in run.decisions] == [reasons[to] for _, to in story]


@pytest.mark.parametrize("margin", [0.0, 50.0])
def test_another_strategy_has_to_be_better_by_the_margin(margin: float, tiny: Any, harmful: None) -> None:
    """From a standstill everything is better: without a margin the run leaves it, and with a large one it stays."""
    policy = {
        "decision_interval": 8,
        "hysteresis": 8,
        "eval_horizon": 4,
        "initial_strategy": "crawl",
        "strategies": ["configured"],
        "max_overhead": 0.9,
        "margin": margin,
    }
    run = tiny.run("run", "phases.0.steps=14", *tiny.floats, policy=policy)
    first = run.decisions[0]
    rewards = {each["name"]: each["reward"] for each in first["candidates"]}
    assert rewards["configured"] > rewards["crawl"]
    assert first["to"] == ("crawl" if margin else max(rewards, key=lambda name: rewards[name]))
