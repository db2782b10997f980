"""Decisions for every reason, every pair of reasons, and within the hysteresis."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import numpy as np
import pytest
from attrs import define

from arb_ternary_orchestrator.config import OrchestratorConfig
from arb_ternary_orchestrator.decisions import DecisionBoundary, Trigger
from arb_ternary_orchestrator.spikes import SpikeDetector
from arb_ternary_orchestrator.telemetry import Observation, Telemetry, Trend

OPTIONS = OrchestratorConfig(
    decision_interval=500, hysteresis=200, spike_window=100, spike_count=3, phase_hold=1
)


@define
class Situation:
    """Stands in for telemetry and detector at a step."""

    phase: str = "mid"
    spikes: int = 0
    baseline: float | None = 2.0
    limit: float = 2.5
    grad_norm: float | None = 1.0
    flip_rate: float | None = 0.001
    trend = Trend(0.0, 1.0, 1.0, 100)
    last: Observation | None = None

    def count(self, window: int) -> int:
        return self.spikes


def decide(
    boundary: DecisionBoundary,
    step: int,
    situation: Any = None,
    *,
    loss: float = 2.0,
    manual: str | None = None,
) -> Trigger | None:
    it: Any = situation or Situation()
    it.last = Observation(step, loss, grad_norm=it.grad_norm)
    return boundary.decide(it, it, manual)


def reason(*arguments: Any, **options: Any) -> str | None:
    trigger = decide(*arguments, **options)
    return None if trigger is None else trigger.reason


#: Facts that cause each reason at step 600, in the order of precedence.
CAUSES: dict[str, dict[str, Any]] = {
    "safety": {"loss": 3.1},
    "spike": {"spikes": 3},
    "flips": {"flip_rate": 0.031},
    "plateau": {"phase": "plateau"},
    "periodic": {"step": 600},
    "phase_change": {"phase": "late"},
    "manual": {"manual": "lion"},
}


def at_once(*causes: str, last: int = 0) -> str | None:
    """The reason at step 600 (400, when no interval has passed) after a decision at step ``last``
    in the phase mid.
    """
    boundary = DecisionBoundary(OPTIONS)
    decide(boundary, last)
    boundary.decided(last)
    facts: dict[str, Any] = {"step": 400}
    for cause in reversed(causes):
        facts |= CAUSES[cause]
    if "phase_change" in causes and "plateau" in causes:
        facts["phase"] = "plateau"
    return reason(
        boundary,
        facts["step"],
        situation_of(facts),
        loss=facts.get("loss", 2.0),
        manual=facts.get("manual"),
    )


def situation_of(facts: dict[str, Any]) -> Situation:
    return Situation(
        **{key: facts[key] for key in ("phase", "spikes", "flip_rate") if key in facts}
    )


@pytest.mark.parametrize("cause", CAUSES)
def test_each_reason_alone(cause: str) -> None:
    assert at_once(cause) == cause


def test_nothing_is_due_without_a_reason() -> None:
    assert at_once() is None


@pytest.mark.parametrize(("first", "second"), list(itertools.combinations(CAUSES, 2)))
def test_first_of_two_reasons_is_given(first: str, second: str) -> None:
    assert at_once(first, second) == first


def test_first_of_all_reasons_is_given() -> None:
    assert at_once(*CAUSES) == "safety"
    assert at_once(*list(CAUSES)[1:]) == "spike"


@pytest.mark.parametrize("cause", CAUSES)
def test_hysteresis_blocks_all_but_safety(cause: str) -> None:
    boundary = DecisionBoundary(OPTIONS)
    decide(boundary, 1000)
    boundary.decided(1000)
    facts = CAUSES[cause]
    situation = situation_of(facts)
    for since in (0, 1, 199):
        found = reason(
            boundary,
            1000 + since,
            situation,
            loss=facts.get("loss", 2.0),
            manual=facts.get("manual"),
        )
        assert found == ("safety" if cause == "safety" else None)
    if cause not in ("safety", "periodic"):
        assert reason(boundary, 1200, situation, manual=facts.get("manual")) == cause


@pytest.mark.parametrize(("share", "due"), [(None, None), (0.03, None), (0.031, "flips")])
def test_few_in_a_hundred_flips_are_far_too_many(share: float | None, due: str | None) -> None:
    boundary = DecisionBoundary(OPTIONS)
    assert reason(boundary, 300, Situation(flip_rate=share)) == due


def test_hysteresis_counts_from_start_and_evaluations() -> None:
    boundary = DecisionBoundary(OPTIONS)
    plateau = Situation(phase="plateau")
    due = []
    for step in range(1, 1000):
        if decide(boundary, step, plateau) is not None:
            due.append(step)
            # an evaluation of 100 steps, whose winner was the strategy in use
            boundary.decided(step + 100)
    assert due == [200, 500, 800]


def test_interval_counts_from_the_last_decision() -> None:
    boundary = DecisionBoundary(OPTIONS)
    due = []
    for step in range(1, 1700):
        trigger = decide(boundary, step)
        if trigger is not None:
            assert trigger == Trigger("periodic", "steps since the last decision", 500)
            due.append(step)
            boundary.decided(step + 50)
    assert due == [500, 1050, 1600]


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_nonfinite_loss_triggers_safety(loss: float) -> None:
    trigger = decide(DecisionBoundary(OPTIONS), 1, Situation(baseline=None), loss=loss)
    assert trigger is not None
    assert (trigger.reason, trigger.metric) == ("safety", "loss")
    assert trigger.value == loss or math.isnan(loss)


def test_nonfinite_gradient_triggers_safety() -> None:
    trigger = decide(DecisionBoundary(OPTIONS), 1, Situation(grad_norm=math.inf))
    assert trigger == Trigger("safety", "gradient norm", math.inf)


@pytest.mark.parametrize(
    ("baseline", "limit", "loss", "danger"),
    [
        (2.0, 2.5, 3.0, False),
        (2.0, 2.5, 3.01, True),
        (2.0, 3.5, 3.4, False),  # noise that large is usual here
        (2.0, 3.5, 3.6, True),
        (-2.0, -1.9, -1.1, False),
        (-2.0, -1.9, -0.9, True),
        (None, math.inf, 100.0, False),
    ],
)
def test_high_loss_exceeds_factor_and_noise(
    baseline: float | None, limit: float, loss: float, danger: bool
) -> None:
    found = decide(
        DecisionBoundary(OPTIONS), 1, Situation(baseline=baseline, limit=limit), loss=loss
    )
    expected = (
        Trigger("safety", "loss / baseline", loss / baseline) if danger and baseline else None
    )
    assert found == expected


def test_loss_factor_is_an_option() -> None:
    options = OrchestratorConfig(max_loss_increase=3.0)
    assert reason(DecisionBoundary(options), 1, Situation(), loss=5.9) is None
    assert reason(DecisionBoundary(options), 1, Situation(), loss=6.1) == "safety"


def test_phase_change_has_to_hold() -> None:
    boundary = DecisionBoundary(
        OrchestratorConfig(hysteresis=0, decision_interval=10_000, phase_hold=5)
    )
    phases = (
        ["warm-up"] * 30 + ["converging"] * 30 + ["mid"] * 4 + ["converging"] * 10 + ["mid"] * 30
    )
    due = [
        step
        for step, phase in enumerate(phases)
        if decide(boundary, step, Situation(phase=phase)) is not None
    ]
    # The end of the warm-up is not a change, nor are four steps; from the fifth step on it is due
    # until it is decided.
    assert due[0] == 30 + 30 + 4 + 10 + 4
    trigger = decide(boundary, len(phases), Situation(phase="mid"))
    assert trigger is not None
    assert (trigger.reason, trigger.metric) == ("phase_change", "phase converging to mid")
    boundary.decided(len(phases))
    assert decide(boundary, len(phases) + 1, Situation(phase="mid")) is None


def test_request_is_postponed_only_once() -> None:
    boundary = DecisionBoundary(OPTIONS)
    plateau = Situation(phase="plateau")
    found = []
    for step in range(1, 900):
        trigger = decide(
            boundary, step, plateau, manual="lion" if step > 100 and "manual" not in found else None
        )
        if trigger is not None:
            found.append(trigger.reason)
            boundary.decided(step)
    assert found == ["plateau", "manual", "plateau", "plateau"]


def test_manual_trigger_names_the_strategy() -> None:
    assert decide(DecisionBoundary(OPTIONS), 300, manual="lion") == Trigger(
        "manual", "asked for lion", 300
    )


def test_spikes_before_the_last_decision_do_not_count() -> None:
    options = OrchestratorConfig(hysteresis=10, decision_interval=10_000)
    boundary = DecisionBoundary(options)
    telemetry = Telemetry()
    spikes = SpikeDetector()
    generator = np.random.default_rng(1)
    found = []
    for step in range(1, 200):
        loss = float(generator.normal(2.0, 0.01)) + 0.5 * (step in (50, 60, 70))
        telemetry.observe(Observation(step, loss))
        spikes.observe(loss)
        trigger = boundary.decide(telemetry, spikes, None)
        if trigger is not None and trigger.reason == "spike":
            found.append((step, trigger.metric, trigger.value))
            boundary.decided(step)
    assert found == [(70, "spikes in 70 steps", 3)]


def test_decisions_on_a_realistic_loss_curve() -> None:
    boundary = DecisionBoundary(OPTIONS)
    telemetry = Telemetry()
    spikes = SpikeDetector()
    generator = np.random.default_rng(2)
    losses = [
        *(5 - 0.015 * np.arange(190) + generator.normal(0, 0.05, 190)),
        *generator.normal(2.15, 0.05, 260),
        3.5,
    ]
    found = []
    for step, loss in enumerate(map(float, losses), start=1):
        telemetry.observe(Observation(step, loss))
        spikes.observe(loss)
        trigger = boundary.decide(telemetry, spikes, None)
        if trigger is not None:
            found.append((step, trigger.reason))
            boundary.decided(step)
    # Of five points the first estimate is mid; the steep fall that it turns into is a change.
    assert found == [(200, "phase_change"), (400, "plateau"), (451, "safety")]


def test_state_roundtrip() -> None:
    first = DecisionBoundary(OPTIONS)
    second = DecisionBoundary(OPTIONS)
    for step in range(1, 250):
        decide(
            first,
            step,
            Situation(phase="plateau" if step == 249 else "mid"),
            manual="lion" if step > 240 else None,
        )
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for step in range(250, 260):
        situation = Situation(phase="plateau")
        assert decide(first, step, situation, manual="lion") == decide(
            second, step, situation, manual="lion"
        )
    assert first.state_dict() == second.state_dict()


FLIPPING = {
    "decision_interval": 1000,
    "hysteresis": 12,
    "eval_horizon": 4,
    "telemetry_every": 2,
    "window": 100,
    "probe_batches": 0,
}


@pytest.mark.parametrize(
    # Of 32 steps three candidates lose 8 of 40, which is 20 %, and two lose 4 of 36.
    ("most", "count"),
    [(0.2, 3), (0.19, 2)],
)
def test_far_too_high_rate_is_compared_with_the_lowest(most: float, count: int, tiny: Any) -> None:
    options = {**FLIPPING, "max_overhead": most}
    run = tiny.run("run", "phases.0.steps=32", "optimizer.ternary.lr=3.0", policy=options)
    first, *others = run.decisions
    assert (first["step"], first["reason"], first["from"]) == (12, "flips", "configured")
    assert first["value"] > 0.03
    # A quarter of the rate of votes, then half of it, then the one in use.
    lowest, *half, current = (each["name"] for each in first["candidates"])
    assert (lowest, current) == ("spike_resistant", "configured")
    assert half in ([], ["conservative_adamw"], ["conservative_votes"])
    assert len(half) == count - 2
    assert not any(each["candidates"] for each in others)


@pytest.mark.parametrize(
    "usual",
    ["optimizer.ternary.lr=0.1", "model.vote_bits=2"],
    ids=["default", "accumulators of 2 bits"],
)
def test_usual_rate_is_not_too_high(usual: str, tiny: Any) -> None:
    run = tiny.run("run", "phases.0.steps=32", usual, policy=FLIPPING)
    assert run.decisions == []


def test_rate_that_no_strategy_lowers_is_reported_once(tiny: Any) -> None:
    options = {**FLIPPING, "initial_strategy": "spike_resistant", "max_overhead": 0.9}
    run = tiny.run("run", "phases.0.steps=32", "optimizer.ternary.lr=12.0", policy=options)
    (told,) = run.decisions
    assert (told["reason"], told["step"]) == ("flips", 12)
    assert told["not_begun"] == (
        "no strategy has a lower rate of votes than spike_resistant: lower that of the config"
    )
