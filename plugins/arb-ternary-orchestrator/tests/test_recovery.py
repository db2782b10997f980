"""The return to the interrupted strategy after a rollback."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
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


def test_interrupted_strategy_returns_once() -> None:
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
    recovery.cancel()
    assert recovery.due(60) is None


def restored(recovery: Recovery) -> Recovery:
    """Return the recovery of a resumed run."""
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
def test_run_returns_to_the_interrupted_strategy(
    exploding: tuple[int, ...],
    story: list[tuple[int, str]],
    tiny: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loss = TrainingLoop.loss

    def disturbed(self: Any, batch: Any, masked: Any, output: Tensor) -> Tensor:
        value = loss(self, batch, masked, output)
        return value * 10.0 if value.requires_grad and self.microbatches in exploding else value

    monkeypatch.setattr(TrainingLoop, "loss", disturbed)
    run = tiny.run("run", "phases.0.steps=36", *tiny.floats, policy=GUARDED)
    assert [(each["step"], each["to"]) for each in run.decisions] == story
    reasons = {"spike_resistant": "safety", "configured": "recovered"}
    assert [each["reason"] for each in run.decisions] == [reasons[to] for _, to in story]


@pytest.mark.parametrize("margin", [0.0, 50.0])
def test_winner_has_to_exceed_the_margin(margin: float, tiny: Any, harmful: None) -> None:
    """From a standstill everything is better: without a margin the run leaves it, and with a large
    one it stays.
    """
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


def test_explosion_in_the_last_step_is_rolled_back(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss = TrainingLoop.loss

    def disturbed(self: Any, batch: Any, masked: Any, output: Tensor) -> Tensor:
        value = loss(self, batch, masked, output)
        return value * 10.0 if value.requires_grad and self.microbatches == 24 else value

    monkeypatch.setattr(TrainingLoop, "loss", disturbed)
    run = tiny.run("run", "phases.0.steps=24", *tiny.floats, policy=GUARDED)
    (decision,) = run.decisions
    assert (decision["reason"], decision["step"], decision["rolled_back_to"]) == ("safety", 24, 20)
    # The result is that of a run of the 20 good steps.
    good = tiny.run("good", "phases.0.steps=20", *tiny.floats)
    left = run.last.model
    right = good.last.model
    assert sorted(left) == sorted(right)
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_candidate_with_exploding_loss_fails(
    tiny: Any, harmful: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss = TrainingLoop.loss

    def disturbed(self: Any, batch: Any, masked: Any, output: Tensor) -> Tensor:
        value = loss(self, batch, masked, output)
        return (
            value * 100.0 if value.requires_grad and self.adjustment.float_rate == 300.0 else value
        )

    monkeypatch.setattr(TrainingLoop, "loss", disturbed)
    policy = {
        "decision_interval": 16,
        "hysteresis": 16,
        "eval_horizon": 4,
        "strategies": ["wild"],
        "safety_strategy": "configured",
        "max_overhead": 0.9,
    }
    run = tiny.run("run", "phases.0.steps=24", *tiny.floats, policy=policy)
    told = {each["name"]: each for each in run.decisions[0]["candidates"]}
    assert (told["wild"]["failed"], told["wild"]["steps"]) == ("its loss exploded in step 1", 1)
    assert told["configured"]["failed"] is None
    assert run.decisions[0]["to"] == "configured"


def test_third_party_strategies_need_to_be_named(tiny: Any, harmful: None) -> None:
    alone = tiny.run("alone", "phases.0.steps=2", *tiny.floats, policy={"eval_horizon": 1})
    assert {"wild", "wilder", "crawl", "broken"}.isdisjoint(alone.policy["bandit"]["tried"])
    named = tiny.run(
        "named",
        "phases.0.steps=2",
        *tiny.floats,
        policy={"eval_horizon": 1, "strategies": ["wild"]},
    )
    assert "wild" in named.policy["bandit"]["tried"]
