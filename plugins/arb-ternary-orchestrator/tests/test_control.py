"""Requests to switch the strategy of a running process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from arb_ternary.errors import ArbError
from arb_ternary_orchestrator.control import ControlFile, SwitchRequest
from arb_ternary_train.context import TrainingContext
from arb_ternary_train.progress import Silent

#: Nothing but a request leads to a switch, after step 6 at the earliest.
LISTENING = {
    "decision_interval": 1000,
    "eval_horizon": 4,
    "hysteresis": 6,
    "safety_strategy": "configured",
}
OPTIONS = ("phases.0.steps=12",)


class Killed(BaseException):
    """Ends the process at once."""


def asking(tiny: Any, run: str, *names: str) -> type[Silent]:
    """A reporter that writes these requests, one after the other, when the loop starts for the
    first time.
    """
    waiting = list(names)

    class Asking(Silent):
        def start(self, title: str, total: int, done: int) -> None:
            while waiting:
                ControlFile(tiny.folder / run).write(waiting.pop(0))

    return Asking


def test_request_roundtrip(tmp_path: Any) -> None:
    control = ControlFile(tmp_path)
    assert control.read() is None
    request = control.write("sgd_escape")
    assert json.loads((tmp_path / "orchestrator_control.json").read_text()) == {
        "id": request.id,
        "name": "sgd_escape",
    }
    assert control.read() == request == SwitchRequest(request.id, "sgd_escape")
    assert control.write("sgd_escape") != request, "asked twice, they are two requests"


def test_removing_a_request_keeps_a_newer_one(tmp_path: Any) -> None:
    control = ControlFile(tmp_path)
    older = control.write("a")
    newer = control.write("b")
    control.remove(older)
    assert control.read() == newer
    control.remove(newer)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "content",
    [b"{", b"[]", b'{"id": 1, "name": "x"}', b'{"id": "x"}', b"\xff\x00\xff", b"[" * 100_000],
)
def test_invalid_request_is_removed_and_reported(content: bytes, tmp_path: Any) -> None:
    control = ControlFile(tmp_path)
    control.path.write_bytes(content)
    with pytest.raises(ValueError, match=r"orchestrator_control\.json: not a request to switch"):
        control.read()
    assert control.read() is None


@pytest.mark.parametrize("target", ["/dev/full", ".", "orchestrator_control.json"])
def test_a_control_file_that_is_no_file_is_named(target: str, tmp_path: Path) -> None:
    control = ControlFile(tmp_path)
    control.path.symlink_to(target)
    with pytest.raises(ArbError, match=r"orchestrator_control\.json: (is not a file|cannot be op)"):
        control.read()


def test_requested_switch_saves_a_checkpoint(
    tiny: Any,
) -> None:
    run = tiny.run(
        "run", *OPTIONS, policy=LISTENING, reporter=asking(tiny, "run", "aggressive_adamw")
    )
    (decision,) = run.decisions
    assert (decision["step"], decision["from"], decision["to"]) == (
        6,
        "configured",
        "aggressive_adamw",
    )
    assert decision["reason"] == "manual"
    assert not ControlFile(run.directory.path).path.exists()
    assert sorted(path.name for path in run.directory.checkpoints.glob("step-*")) == [
        "step-00000006",
        "step-00000012",
    ]
    # The built-in strategy doubles the rate; the schedule is constant.
    rates = [record["lr"] for record in run.metrics if record["event"] == "train"]
    assert rates == [0.01] * 6 + [0.02] * 6


def test_request_for_the_current_strategy(tiny: Any) -> None:
    run = tiny.run("run", *OPTIONS, policy=LISTENING, reporter=asking(tiny, "run", "configured"))
    (record,) = [each for each in run.metrics if each["event"] == "decision"]
    assert (record["reason"], record["from"], record["to"]) == (
        "manual",
        "configured",
        "configured",
    )
    assert "mark" not in record


def test_request_for_an_unknown_strategy_is_reported(tiny: Any, harmful: None) -> None:
    run = tiny.run(
        "run",
        *OPTIONS,
        policy={**LISTENING, "strategies": ["wild"]},
        reporter=asking(tiny, "run", "crawl"),
    )
    assert not run.decisions
    assert not ControlFile(run.directory.path).path.exists()
    log = run.directory.log_file.read_text()
    assert (
        "step 1: orchestrator: asked to switch to 'crawl'; this loop chooses among configured, wild"
        in log
    )


def test_request_for_an_impossible_strategy_is_reported(
    tiny: Any, equal: Any, harmful: None
) -> None:
    plain = tiny.run("plain", *OPTIONS)
    run = tiny.run(
        "run",
        *OPTIONS,
        policy={**LISTENING, "strategies": ["broken"]},
        reporter=asking(tiny, "run", "broken"),
    )
    assert (
        "orchestrator: strategy 'broken': its optimizer cannot be made"
        in run.directory.log_file.read_text()
    )
    assert not ControlFile(run.directory.path).path.exists()
    equal(run.trained, plain.trained)


@pytest.mark.parametrize(
    "method",
    [
        pytest.param((TrainingContext, "save_checkpoint"), marks=pytest.mark.slow),
        (ControlFile, "remove"),
    ],
    ids=["before the checkpoint", "between checkpoint and removal"],
)
def test_killed_process_switches_exactly_once(
    method: tuple[type, str], tiny: Any, equal: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tiny.run(
        "whole", *OPTIONS, policy=LISTENING, reporter=asking(tiny, "whole", "aggressive_adamw")
    )

    def dying(*arguments: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(*method, dying)
        with pytest.raises(Killed):
            tiny.run(
                "run", *OPTIONS, policy=LISTENING, reporter=asking(tiny, "run", "aggressive_adamw")
            )
    assert ControlFile(tiny.folder / "run").path.exists()
    run = tiny.run("run", *OPTIONS, policy=LISTENING, resume="auto")
    equal(run.trained, whole.trained)
    assert run.decisions == whole.decisions
    assert run.metrics == whole.metrics
    assert not ControlFile(run.directory.path).path.exists()
