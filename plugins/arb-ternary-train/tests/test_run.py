"""Training from Python."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import arb_ternary
from arb_ternary.cli.main import main
from arb_ternary.config.fields import to_plain
from arb_ternary.errors import ConfigError, UsageProblem
from arb_ternary_train.run import Run


def files_of(run: Path) -> dict[str, bytes]:
    """Return the weights of the newest checkpoint, and the metrics."""
    newest = (run / "checkpoints" / "latest").read_text(encoding="utf-8").strip()
    return {
        "weights": (run / "checkpoints" / newest / "model.safetensors").read_bytes(),
        "metrics": (run / "metrics.jsonl").read_bytes(),
    }


def test_train_gives_the_run_of_the_command(tiny: Any, tmp_path: Path) -> None:
    config = tmp_path / "tiny.yaml"
    config.write_text(tiny.file.read_text(encoding="utf-8"), encoding="utf-8")
    command = ["train", str(config), "--run-dir", str(tmp_path / "command"), "-o", "seed=3"]
    assert main([*command, "-o", "phases.0.steps=3"]) == 0
    run = arb_ternary.train(config, {"phases.0.steps": 3}, run_dir=tmp_path / "python", seed=3)
    assert run.directory == tmp_path / "python"
    assert files_of(run.directory) == files_of(tmp_path / "command")
    assert run.config["seed"] == 3


def test_a_config_may_be_plain_values(tiny: Any, tmp_path: Path) -> None:
    plain = to_plain(tiny.config("phases.0.steps=2"))
    run = arb_ternary.train(plain, run_dir=tmp_path / "plain")
    assert files_of(run.directory)["metrics"]
    with pytest.raises(ConfigError, match="sead"):
        arb_ternary.train(plain, run_dir=tmp_path / "wrong", sead=3)
    assert not (tmp_path / "wrong").exists()


def test_resume_continues_with_the_same_bits(tiny: Any, tmp_path: Path) -> None:
    whole = arb_ternary.train(tiny.file, {"phases.0.steps": 6}, run_dir=tmp_path / "whole")
    run = arb_ternary.train(tiny.file, {"phases.0.steps": 3}, run_dir=tmp_path / "parts")
    assert run.resume({"phases.0.steps": 6}) is run
    assert files_of(run.directory)["weights"] == files_of(whole.directory)["weights"]
    assert run.metrics["step"].max() == 6


def test_metrics_are_columns(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = arb_ternary.train(tiny.file, {"phases.0.steps": 3}, run_dir=tmp_path / "run")
    lines = (run.directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    losses = [record["loss"] for record in map(json.loads, lines) if record.get("event") == "train"]
    found = importlib.util.find_spec
    monkeypatch.setattr(
        "arb_ternary_train.run.find_spec",
        lambda name: None if name == "pandas" else found(name),
    )
    columns = run.metrics
    assert isinstance(columns, dict)
    trained = [event == "train" for event in columns["event"]]
    picked = [loss for loss, is_step in zip(columns["loss"], trained, strict=True) if is_step]
    assert picked == losses
    monkeypatch.undo()
    pandas = pytest.importorskip("pandas")
    table = run.metrics
    assert isinstance(table, pandas.DataFrame)
    assert table[table["event"] == "train"]["loss"].tolist() == losses


def test_plot_is_a_picture(tiny: Any, tmp_path: Path) -> None:
    one = arb_ternary.train(tiny.file, {"phases.0.steps": 3}, run_dir=tmp_path / "one")
    two = arb_ternary.train(tiny.file, {"phases.0.steps": 4}, run_dir=tmp_path / "two")
    drawn = one.plot(two)
    assert drawn._repr_png_().startswith(b"\x89PNG")
    drawn.save(tmp_path / "curves.svg")
    assert "<svg" in (tmp_path / "curves.svg").read_text(encoding="utf-8")


def test_model_has_the_weights_of_the_checkpoint(tiny: Any, tmp_path: Path) -> None:
    run = arb_ternary.train(tiny.file, {"phases.0.steps": 2}, run_dir=tmp_path / "run")
    model = run.model()
    assert not model.training
    newest = (run.directory / "checkpoints" / "latest").read_text(encoding="utf-8").strip()
    from safetensors.torch import load_file

    saved = load_file(run.directory / "checkpoints" / newest / "model.safetensors")
    state = model.state_dict()
    shared = [name for name in saved if name in state and saved[name].shape == state[name].shape]
    assert any("exponent" in name for name in shared)
    assert all(torch.equal(saved[name], state[name]) for name in shared if "exponent" in name)


def test_generate_needs_the_package_that_writes(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = arb_ternary.train(tiny.file, {"phases.0.steps": 2}, run_dir=tmp_path / "run")
    if importlib.util.find_spec("arb_ternary_chat") is None:
        with pytest.raises(ImportError, match="pip install"):
            run.generate("a")
    else:
        options = {"temperature": 0.0, "max_new_tokens": 5}
        load_model: Any = getattr(arb_ternary, "load_model")  # noqa: B009
        assert run.generate("a", **options) == load_model(run.directory).generate("a", **options)


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageProblem):
        Run(tmp_path)
