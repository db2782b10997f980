from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from torch import nn

from arb_ternary.cli.main import main
from arb_ternary.errors import ArbError, ConfigError, UsageProblem
from arb_ternary.ternary.models import ternary_modules
from arb_ternary_interchange.export import export_model
from arb_ternary_interchange.safetensors.exporter import SafetensorsExporter
from arb_ternary_train.checkpoint import read_checkpoint


def test_an_export_holds_the_tensors_of_the_checkpoint(tiny: Any, tmp_path: Path) -> None:
    run, _ = tiny.run("run")
    destination = tmp_path / "deep" / "model.safetensors"
    exported = export_model(run.path, destination, "safetensors")
    assert exported.summary == f"safetensors, step 8 of {run.path}"
    wanted = read_checkpoint(run.checkpoints / "step-00000008").model
    with safetensors.safe_open(destination, "pt") as file:
        metadata = json.loads(file.metadata()["arb_ternary"])
        assert set(file.keys()) == set(wanted)
        assert all(torch.equal(file.get_tensor(name), wanted[name]) for name in wanted)
    assert metadata["step"] == 8
    assert metadata["model"]["width"] == 16
    assert metadata["tokenizer"]["kind"] == "characters"


def test_an_export_replaces_a_file_by_a_complete_one_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    destination = tmp_path / "model.safetensors"
    SafetensorsExporter().export(torch.nn.Linear(2, 2), destination, {})
    before = destination.read_bytes()
    monkeypatch.setattr("arb_ternary_interchange.safetensors.exporter.write_tensors", full)
    with pytest.raises(ArbError, match=r"model\.safetensors: cannot be written: .*No space left"):
        SafetensorsExporter().export(torch.nn.Linear(2, 2), destination, {})
    assert destination.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_unknown_exporters_and_options_are_refused(tiny: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageProblem, match="no exporter is called 'safetensor'"):
        export_model(tmp_path, tmp_path / "x", "safetensor")
    with pytest.raises(ConfigError, match="level"):
        export_model(tmp_path, tmp_path / "x", "safetensors", ["level=3"])


def test_an_export_that_writes_no_accumulators_is_given_none(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[int] = []

    class Exporter:
        writes_accumulators = False

        def export(self, model: nn.Module, *_: object) -> None:
            given.append(sum(module.votes.nbytes for _, module in ternary_modules(model)))

    run, _ = tiny.run("run")
    monkeypatch.setattr("arb_ternary_interchange.export.named_exporter", lambda *_: Exporter())
    export_model(run.path, tiny.folder / "file", "any")
    monkeypatch.setattr(Exporter, "writes_accumulators", True)
    export_model(run.path, tiny.folder / "file", "any")
    assert given[0] == 0 < given[1]


def test_export_writes_a_file_and_names_an_unknown_exporter(
    tiny: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, _ = tiny.run("run")
    target = tmp_path / "model.safetensors"
    assert main(["export", str(run.path), "--format", "safetensors", str(target)]) == 0
    assert target.stat().st_size > 0
    capsys.readouterr()
    assert main(["export", str(run.path), "x", "--format", "onnx"]) == 2
    assert "no exporter is called 'onnx'" in capsys.readouterr().err
