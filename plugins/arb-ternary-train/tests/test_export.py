from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch

from arb_ternary.errors import ArbError, ConfigError, DataError, UsageProblem
from arb_ternary_train.checkpoint import read_checkpoint
from arb_ternary_train.export import SafetensorsExporter, export_run
from arb_ternary_train.restore import load_run, measure


def test_the_export_holds_the_at_rest_tensors_and_says_what_they_are(
    tiny: Any, tmp_path: Path
) -> None:
    run, _ = tiny.run("run")
    destination = tmp_path / "deep" / "model.safetensors"
    assert export_run(run.path, destination, "safetensors") == f"safetensors, step 8 of {run.path}"
    wanted = read_checkpoint(run.checkpoints / "step-00000008").model
    with safetensors.safe_open(destination, "pt") as file:
        metadata = json.loads(file.metadata()["arb_ternary"])
        assert set(file.keys()) == set(wanted)
        assert all(torch.equal(file.get_tensor(name), wanted[name]) for name in wanted)
    assert metadata["step"] == 8
    assert metadata["model"]["width"] == 16
    assert metadata["tokenizer"]["kind"] == "characters"


def test_an_export_replaces_a_file_only_when_the_new_one_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from arb_ternary_train import export

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    destination = tmp_path / "model.safetensors"
    SafetensorsExporter().export(torch.nn.Linear(2, 2), destination, {})
    before = destination.read_bytes()
    monkeypatch.setattr(export, "write_tensors", full)
    with pytest.raises(ArbError, match=r"model\.safetensors: cannot be written: .*No space left"):
        SafetensorsExporter().export(torch.nn.Linear(2, 2), destination, {})
    assert destination.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_unknown_exporters_and_options_are_refused(tiny: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageProblem, match="no exporter is called 'safetensor'"):
        export_run(tmp_path, tmp_path / "x", "safetensor")
    with pytest.raises(ConfigError, match="level"):
        export_run(tmp_path, tmp_path / "x", "safetensors", ["level=3"])


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
