"""``arb orchestrator explain`` on hand-written records."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from arb_ternary.cli.main import main
from arb_ternary_testing.fakes import RUN_RECORD
from arb_ternary_train.directory import RunDirectory

ORCHESTRATED = "phases:\n- name: standard\n  policy: {name: orchestrator}\n"


Arb = Callable[..., tuple[int, str]]


@pytest.fixture
def arb(capsys: pytest.CaptureFixture[str]) -> Arb:
    """Runs a command and returns its exit code and output."""

    def run(*arguments: object) -> tuple[int, str]:
        code = main([str(each) for each in arguments])
        shown = capsys.readouterr()
        return code, shown.out + shown.err

    return run


def candidate(
    name: str, reward: float | None, end: float | None, failed: str | None = None
) -> dict[str, Any]:
    return {
        "name": name,
        "reward": reward,
        "loss_start": 2.4131,
        "loss_end": end,
        "spikes": 0,
        "probe": 2.3,
        "failed": failed,
        "steps": 100,
    }


def decision(
    step: int, before: str, after: str, reason: str, metric: str, value: Any, **more: Any
) -> dict[str, Any]:
    return {
        "step": step,
        "phase": "standard",
        "from": before,
        "to": after,
        "reason": reason,
        "metric": metric,
        "value": value,
        "candidates": [],
        "steps_spent": 0,
        "seconds": 0.25,
        "rolled_back_to": None,
        "not_begun": None,
        **more,
    }


DECISIONS = [
    decision(
        500,
        "configured",
        "aggressive_votes",
        "periodic",
        "steps since the last decision",
        500,
        candidates=[
            candidate("configured", 0.9211, 2.3001),
            candidate("aggressive_votes", 1.4832, 2.2441),
            candidate("lion_conservative", None, None, "its loss was not finite after 17 steps"),
        ],
        steps_spent=217,
        seconds=41.2,
    ),
    decision(
        800,
        "aggressive_votes",
        "aggressive_votes",
        "plateau",
        "slope in standard errors",
        -0.3132,
        # The margin decides, not the reward.
        candidates=[
            candidate("aggressive_votes", -0.3, 2.41),
            candidate("sgd_escape", -0.25, 2.405),
        ],
        steps_spent=100,
    ),
    decision(
        1021,
        "aggressive_votes",
        "spike_resistant",
        "safety",
        "loss / baseline",
        2.3132,
        rolled_back_to=1000,
    ),
    decision(
        1200, "spike_resistant", "spike_resistant", "safety", "loss", "nan", rolled_back_to=1150
    ),
    decision(
        1500, "spike_resistant", "lion_conservative", "manual", "asked for lion_conservative", 1500
    ),
    decision(
        1700,
        "lion_conservative",
        "lion_conservative",
        "spike",
        "spikes in 100 steps",
        3,
        not_begun="too near",
    ),
    decision(1900, "lion_conservative", "configured", "phase_change", "phase mid to late", 20),
]


def run_with(
    folder: Path, decisions: Sequence[Mapping[str, Any]], steps: int, config: str = ORCHESTRATED
) -> Path:
    run = RunDirectory(folder / "story")
    run.create(config, RUN_RECORD, {})
    lines = [{"event": "train", "step": step, "loss": 2.0} for step in range(1, steps + 1)]
    run.metrics_file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    if decisions:
        (run.path / "orchestrator_decisions.jsonl").write_text(
            "".join(json.dumps(each) + "\n" for each in decisions)
        )
    return run.path


@pytest.mark.parametrize("line", [{}, {**DECISIONS[0], "to": None}, {"step": "\ud800"}])
def test_a_damaged_decision_is_named(arb: Arb, tmp_path: Path, line: dict[str, Any]) -> None:
    line.pop("to", None)
    run = run_with(tmp_path, [DECISIONS[0], line], 2000)
    code, output = arb("orchestrator", "explain", run)
    assert code == 1
    assert "orchestrator_decisions.jsonl:2: the file is damaged: " in output


def test_explain_prints_tables_and_a_summary(arb: Arb, tmp_path: Path) -> None:
    run = run_with(tmp_path, DECISIONS, 2000)
    code, output = arb("orchestrator", "explain", run)
    assert code == 0, output
    lines = [" ".join(line.split()) for line in output.splitlines()]
    assert lines[:8] == [
        "phase step from to why",
        "standard 500 configured aggressive_votes periodic: 500 steps",
        "standard 800 aggressive_votes (stays) plateau: slope -0.3132 errors",
        "standard 1021 aggressive_votes spike_resistant safety: loss 2.313 x baseline, "
        "back to step 1000",
        "standard 1200 spike_resistant (stays) safety: loss nan, back to step 1150",
        "standard 1500 spike_resistant lion_conservative manual: asked for lion_conservative",
        "standard 1700 lion_conservative (stays) spike: spikes in 100 steps 3",
        "standard 1900 lion_conservative configured phase change: mid to late",
    ]
    assert lines[9:15] == [
        "step candidate loss to reward steps time",
        "500 configured 2.4131 2.3001 +0.921 100 lost 41s",
        "aggressive_votes 2.4131 2.2441 +1.483 100 kept",
        "lion_conservative 2.4131 100 failed",
        "800 aggressive_votes 2.4131 2.4100 -0.300 100 kept 0s",
        "sgd_escape 2.4131 2.4050 -0.250 100 lost",
    ]
    assert lines[16:] == [
        "step 500: lion_conservative failed: its loss was not finite after 17 steps",
        "step 1700: nothing was compared: too near",
        f"{run}: steps: 2,000; decisions: 7; comparisons: 2; switches: 4; rollbacks: 2",
        # 317 of 2,317 steps; 41.2 + 6 * 0.25 s
        "Steps of candidates that were not kept: 317, 13.7% of all; time of all decisions: 43s",
    ]


def test_explain_as_json(arb: Arb, tmp_path: Path) -> None:
    run = run_with(tmp_path, DECISIONS, 2000)
    told = json.loads(arb("orchestrator", "explain", run, "--json")[1])
    assert told.pop("decisions") == DECISIONS
    assert told == {
        "run": str(run),
        "steps": 2000,
        "steps_spent": 317,
        "overhead": pytest.approx(317 / 2317),
        "seconds": pytest.approx(42.7),
        "comparisons": 2,
        "switches": 4,
        "rollbacks": 2,
    }


def test_phase_column_names_each_phase(arb: Arb, tmp_path: Path) -> None:
    decisions = [DECISIONS[0], {**DECISIONS[4], "phase": "global"}]
    lines = arb("orchestrator", "explain", run_with(tmp_path, decisions, 9))[1].splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["phase", "standard", "global"]


def test_run_without_decisions(arb: Arb, tmp_path: Path) -> None:
    run = run_with(tmp_path, [], 30)
    code, output = arb("orchestrator", "explain", run)
    assert code == 0
    assert output.strip() == f"{run}: no decision was due in 30 steps."
    assert json.loads(arb("orchestrator", "explain", run, "--json")[1])["decisions"] == []


def test_run_without_orchestrator_and_missing_run(arb: Arb, tmp_path: Path) -> None:
    run = run_with(tmp_path, [], 30, "phases:\n- name: standard\n")
    code, output = arb("orchestrator", "explain", run)
    assert code == 2
    assert "this run has no orchestrator" in output
    code, output = arb("orchestrator", "explain", tmp_path / "stroy")
    assert code == 2
    assert f"did you mean {run}?" in output
