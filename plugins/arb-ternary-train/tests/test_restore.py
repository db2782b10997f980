"""Loading the model of a run from its directory or a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from arb_ternary.errors import DataError, UsageProblem
from arb_ternary_train.restore import load_run, measure


def test_a_run_read_back_measures_what_the_run_itself_measured(tiny: Any) -> None:
    run, report = tiny.run("run")
    trained = load_run(run.path)
    assert not trained.model.training
    result, baselines = measure(trained)
    assert result.loss == report.validation_loss
    assert baselines == report.baselines
    older = load_run(run.checkpoints / "step-00000006")
    assert older.checkpoint.step == 6
    assert measure(older)[0].loss != report.validation_loss


def test_a_run_is_measured_on_its_own_data_only(tiny: Any) -> None:
    run, _ = tiny.run("run")
    text = tiny.folder / "text.txt"
    text.write_text(text.read_text()[::-1])
    with pytest.raises(DataError, match="its fingerprint is"):
        measure(load_run(run.path))


def test_a_run_is_used_without_its_data(tiny: Any) -> None:
    run, _ = tiny.run("run")
    (tiny.folder / "text.txt").unlink()
    assert load_run(run.path).directory.attachments()["tokenizer"]["kind"] == "characters"


def test_what_is_neither_a_run_nor_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageProblem, match=r"it has no run\.json"):
        load_run(tmp_path)
