"""Comparisons of candidates are fair, and candidates that lose leave no trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor, nn

from arb_ternary_orchestrator.branches import probe_loss, reward
from arb_ternary_orchestrator.control import ControlFile
from arb_ternary_text.data.masking import CausalMasking
from arb_ternary_train.loop import TrainingLoop
from arb_ternary_train.progress import Silent

#: Compares after steps 8 and 20 (12 + 8), and tries each candidate for 4 steps.
COMPARING = {
    "decision_interval": 8,
    "hysteresis": 8,
    "eval_horizon": 4,
    "strategies": ["configured", "wild", "wilder"],
    "safety_strategy": "wild",
    "max_overhead": 0.9,
    "snapshot_every": 5,
}

pytestmark = pytest.mark.usefixtures("harmful")


def test_reward_formula() -> None:
    assert reward(2.0, 1.5, 3, 1.6) == pytest.approx(10 * 0.5 - 0.3 - 0.16)
    assert reward(1.5, 2.0, 0, None) == pytest.approx(-5.0)


def test_the_loss_of_a_probe_is_a_mean_over_predictions() -> None:
    loop: Any = MagicMock()
    loop.options.use_amp = False
    loop.context.device = torch.device("cpu")
    loop.model = nn.Identity()
    loop.count_predictions.side_effect = [1, 3]
    loop.loss.side_effect = [2.0, 4.0]
    assert probe_loss(loop, [loop.batch, loop.batch]) == pytest.approx((2.0 + 3 * 4.0) / 4)


def test_run_without_decisions_equals_the_plain_run(tiny: Any, equal: Any) -> None:
    plain = tiny.run("plain")
    watched = tiny.run(
        "watched", policy={"eval_horizon": 4, "telemetry_every": 3, "snapshot_every": 5}
    )
    equal(watched.trained, plain.trained)
    assert watched.directory.metrics_file.read_bytes() == plain.directory.metrics_file.read_bytes()
    assert not watched.decisions
    assert {path.name for path in watched.directory.path.iterdir()} == {
        path.name for path in plain.directory.path.iterdir()
    }


def test_losing_candidates_leave_no_trace(tiny: Any, equal: Any) -> None:
    plain = tiny.run("plain")
    compared = tiny.run("compared", policy=COMPARING)
    first, second = compared.decisions
    for decision, step in ((first, 8), (second, 20)):
        assert (decision["step"], decision["from"], decision["to"]) == (
            step,
            "configured",
            "configured",
        )
        assert decision["reason"] == "periodic"
        rewards = {trial["name"]: trial["reward"] for trial in decision["candidates"]}
        assert rewards.keys() == {"configured", "wild", "wilder"}
        assert max(rewards, key=lambda name: rewards[name] or -1e9) == "configured"
        assert decision["steps_spent"] == sum(
            trial["steps"] for trial in decision["candidates"] if trial["name"] != "configured"
        )
        assert decision["steps_spent"] >= 2
    equal(compared.trained, plain.trained)
    assert compared.steps == plain.steps
    log = compared.directory.log_file.read_text()
    for place, trial in enumerate(first["candidates"], start=1):
        assert f"step 8: orchestrator: trying {trial['name']} ({place} of 3)" in log


def test_winner_continues_as_if_chosen_at_once(tiny: Any, equal: Any) -> None:
    options = {
        **COMPARING,
        "initial_strategy": "crawl",
        "strategies": ["configured"],
        "safety_strategy": "configured",
    }
    options["margin"] = 0.0
    compared = tiny.run("compared", "phases.0.steps=16", policy=options)

    class Asking(Silent):
        def start(self, title: str, total: int, done: int) -> None:
            ControlFile(tiny.folder / "asked").write("configured")

    asked = tiny.run(
        "asked", "phases.0.steps=16", policy={**options, "decision_interval": 100}, reporter=Asking
    )
    assert [(each["step"], each["from"], each["to"]) for each in compared.decisions] == [
        (8, "crawl", "configured")
    ]
    assert [(each["step"], each["reason"], each["to"]) for each in asked.decisions] == [
        (8, "manual", "configured")
    ]
    equal(compared.trained, asked.trained)
    assert compared.steps == asked.steps


def test_candidates_see_the_same_samples_and_probe(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[int]] = []
    apply = CausalMasking.apply

    def recording(self: CausalMasking, batch: Any, generator: Any, context: Any) -> Any:
        assert context.training
        seen.append(batch.sample_ids.tolist())
        return apply(self, batch, generator, context)

    monkeypatch.setattr(CausalMasking, "apply", recording)
    tiny.run("plain", "phases.0.steps=16")
    plain = list(seen)
    seen[:] = []
    # Failing candidates would draw fewer microbatches.
    harmless = {
        **COMPARING,
        "strategies": ["conservative_adamw", "aggressive_adamw"],
        "probe_batches": 2,
    }
    tiny.run(
        "compared", "phases.0.steps=16", policy={**harmless, "safety_strategy": "aggressive_adamw"}
    )
    assert seen[:8] == plain[:8]
    tried = [seen[8 + 6 * place : 8 + 6 * (place + 1)] for place in range(3)]
    for branch in tried:
        assert branch[:4] == plain[8:12]
        assert branch[4:] == tried[0][4:]
    assert tried[0][4:] != plain[8:10]
    assert seen[8 + 18 :] == plain[12:]


def test_steps_of_a_branch_are_reported_once(
    tiny: Any,
) -> None:
    run = tiny.run(
        "run",
        "phases.0.eval_every=10",
        "phases.0.eval_batches=1",
        "checkpoint.every=10",
        policy=COMPARING,
    )
    assert [record["step"] for record in run.metrics if record["event"] == "train"] == list(
        range(1, 25)
    )
    # Steps 9 to 12 and 21 to 24 are branches. The last evaluation is at the end of the run.
    events = [
        (record["event"], record["step"]) for record in run.metrics if record["event"] != "train"
    ]
    assert events == [
        ("decision", 8),
        ("validation", 12),
        ("validation", 20),
        ("decision", 20),
        ("validation", 24),
    ]
    saved = sorted(path.name for path in run.directory.checkpoints.glob("step-*"))
    assert saved == ["step-00000012", "step-00000020", "step-00000024"]


def test_candidate_with_nonfinite_loss_fails_alone(
    tiny: Any, equal: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = tiny.run("plain", "phases.0.steps=16")
    _poison(monkeypatch, lambda loop: loop.adjustment.float_rate == 300.0 and loop.step == 10)
    # No finite loss is too large.
    run = tiny.run("run", "phases.0.steps=16", policy={**COMPARING, "max_loss_increase": 1e6})
    (decision,) = run.decisions
    (failed,) = [trial for trial in decision["candidates"] if trial["failed"]]
    assert (failed["name"], failed["reward"], failed["steps"]) == ("wild", None, 2)
    assert failed["failed"] == "its loss was not finite after 2 steps"
    assert run.policy["bandit"]["failed"] == {"configured": 0, "wild": 1, "wilder": 0}
    equal(run.trained, plain.trained)


def test_candidate_without_optimizer_fails_alone(tiny: Any, equal: Any) -> None:
    plain = tiny.run("plain", "phases.0.steps=16")
    run = tiny.run(
        "run", "phases.0.steps=16", policy={**COMPARING, "strategies": ["configured", "broken"]}
    )
    (decision,) = run.decisions
    (failed,) = [trial for trial in decision["candidates"] if trial["failed"]]
    assert (failed["name"], failed["steps"]) == ("broken", 0)
    assert failed["failed"].startswith(
        "strategy 'broken': its optimizer cannot be made for this model: "
    )
    equal(run.trained, plain.trained)


def test_safety_strategy_continues_if_all_candidates_fail(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _poison(monkeypatch, lambda loop: loop.microbatches == 10)
    run = tiny.run("run", "phases.0.steps=16", policy=COMPARING)
    first, second = run.decisions[:2]
    assert (first["step"], first["to"], first["reason"]) == (8, "wild", "periodic")
    assert all(trial["failed"] for trial in first["candidates"])
    assert first["steps_spent"] == 3
    # Now the poisoned microbatch is part of the run.
    assert (second["step"], second["reason"]) == (9, "safety")


def test_batch_without_finite_loss_fails_no_candidate(
    tiny: Any, equal: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _poison(monkeypatch, lambda loop: loop.microbatches == 10 and loop.model.training)
    plain = tiny.run("plain", "phases.0.steps=16")
    run = tiny.run("run", "phases.0.steps=16", policy=COMPARING)
    (decision,) = run.decisions
    assert (decision["reason"], decision["to"]) == ("periodic", "configured")
    trials = {each["name"]: (each["failed"], each["steps"]) for each in decision["candidates"]}
    assert trials["configured"] == (None, 3)
    equal(run.trained, plain.trained)
    assert run.steps == plain.steps


def _poison(monkeypatch: pytest.MonkeyPatch, when: Callable[[Any], bool]) -> None:
    """Make the losses of training and of probes NaN while something holds."""
    loss = TrainingLoop.loss

    def poisoned(self: Any, batch: Any, masked: Any, output: Tensor) -> Tensor:
        value = loss(self, batch, masked, output)
        return value * float("nan") if when(self) else value

    monkeypatch.setattr(TrainingLoop, "loss", poisoned)
