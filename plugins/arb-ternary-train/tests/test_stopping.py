"""Runs without evaluations or checkpoints, and signals during an evaluation."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
from attrs import evolve

from arb_ternary.errors import Interrupted
from arb_ternary_text.data.masking import CausalMasking
from arb_ternary_train.metrics import read_metrics

FINAL = ("metrics.jsonl", "checkpoints/step-00000008/*")


@pytest.fixture
def signal_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[int]]:
    """Send SIGTERM while the n-th batch of evaluations is masked; count the batches."""

    def arrange(wanted: int) -> list[int]:
        apply = CausalMasking.apply
        evaluated = []

        def interrupting(self: CausalMasking, batch: Any, generator: Any, context: Any) -> Any:
            if not context.training:
                evaluated.append(context.step)
                if len(evaluated) == wanted:
                    os.kill(os.getpid(), signal.SIGTERM)
            return apply(self, batch, generator, context)

        monkeypatch.setattr(CausalMasking, "apply", interrupting)
        return evaluated

    return arrange


PHASE = "{name: standard, steps: 4, batch_size: 2, block_size: 8, eval_every: 4, eval_batches: 6}"


@pytest.mark.parametrize(
    ("override", "batch", "step"),
    [
        ("phases.0.eval_batches=6", 3, 4),
        (f"phases=[{PHASE}, {PHASE}]", 3, 4),
        ("phases.0.eval_batches=6", 9, 8),
    ],
    ids=["between steps", "at the end of a phase", "at the end of the run"],
)
def test_signal_during_evaluation_stops_at_the_next_batch(
    override: str,
    batch: int,
    step: int,
    tiny: Any,
    files_in: Any,
    signal_at: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole, _ = tiny.run("whole", override)
    evaluated = signal_at(batch)
    with pytest.raises(Interrupted, match=f"SIGTERM after step {step}"):
        tiny.run("stopped", override)
    assert len(evaluated) == batch, "another batch was evaluated after the signal"
    monkeypatch.undo()
    resumed, _ = tiny.run("stopped", override, resume="auto")
    assert files_in(resumed.path, FINAL) == files_in(whole.path, FINAL)


def events(run: Any) -> list[str]:
    return [record["event"] for record in read_metrics(run.metrics_file)]


def test_a_run_that_never_evaluates_reports_no_loss(tiny: Any) -> None:
    run, report = tiny.run("run", "phases.0.eval_every=0", "phases.0.eval_batches=8")
    assert events(run) == ["train"] * 8
    assert report.validation_loss is None
    assert report.rows()[0] == ("validation loss (nats per token)", "not evaluated")
    assert not any(name == "evaluated on" for name, _ in report.rows())


def test_a_report_leads_with_loss_and_size(tiny: Any) -> None:
    _, report = tiny.run("run", "phases.0.steps=2", "phases.0.block_size=4")
    rows = dict(report.rows())
    names = list(rows)
    assert names[0] == "validation loss (nats per token)"
    assert names.index("model size") < names.index("steps")
    # The text is short: an evaluation of at least 16,384 tokens takes all that are held out.
    assert rows["evaluated on"] == "all validation tokens"
    assert evolve(report, validation_share=0.254).rows()[3] == (
        "evaluated on",
        "25% of the validation tokens",
    )
    stored = {row.what: row.nbytes for row in report.audit.rows}
    kept = sum(stored.values()) - stored["votes"] - stored["exponent votes"]
    assert report.audit.model_bytes == kept - stored["control words"]
    assert all(row[1] != "0" for row in report.audit.table())


def test_a_check_of_the_loss_evaluates_where_the_run_does_not(tiny: Any) -> None:
    _, report = tiny.run(
        "run",
        "phases.0.eval_every=0",
        "phases.0.eval_batches=8",
        "checks=[{name: validation_loss, max: 100.0}]",
    )
    assert not report.failed_checks
    assert report.validation_loss is not None


def test_run_without_checkpoints_saves_only_when_stopped(tiny: Any, signal_at: Any) -> None:
    run, _ = tiny.run("never", "checkpoint.every=0")
    assert not list(run.checkpoints.iterdir())
    signal_at(1)
    with pytest.raises(Interrupted):
        tiny.run("stopped", "checkpoint.every=0")
    assert [path.name for path in (tiny.folder / "stopped" / "checkpoints").glob("step-*")] == [
        "step-00000004"
    ]


@pytest.mark.parametrize(("steps", "tokens"), [(3, 16_384), (80, 80 * 32 * 8)])
def test_tokens_of_the_evaluation_at_the_end(steps: int, tokens: int, tiny: Any) -> None:
    (tiny.folder / "validation.txt").write_text((tiny.folder / "text.txt").read_text() * 20)
    data = (
        f"data={{name: text, path: {tiny.folder}/text.txt, validation: "
        f"{tiny.folder}/validation.txt}}"
    )
    run, report = tiny.run(
        "run", data, f"phases.0.steps={steps}", "phases.0.eval_every=100", "phases.0.batch_size=32"
    )
    (record,) = [
        record for record in read_metrics(run.metrics_file) if record["event"] == "validation"
    ]
    assert (record["tokens"], record["loss"]) == (tokens, report.validation_loss)
