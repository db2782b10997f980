from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from arb_ternary.cli.main import main
from arb_ternary_manifests.document import read_manifest
from arb_ternary_manifests.dry_run import forecast
from arb_ternary_manifests.plan import plan
from arb_ternary_train.restore import load_run

Write = Callable[..., Path]
HEAD = """version: 2
name: study
vars: {lr: 0.001, spare: 1}
variants: {quick: {lr: 0.5}}
targets:
  - name: one
    system: SYSTEM
    config: {data: {name: text, path: text.txt}, checkpoint: {every: 2}}
"""
RUNS = """
runs:
  - {id: a, steps: 3, train: {batch_size: 2, block_size: 8, lr: "${lr}"}}
  - id: b
    steps: 2
    train: {batch_size: 2, block_size: 8, lr: 0.002}
    verify: {type: validation_loss, max: 50}
"""


def files(folder: Path) -> dict[str, bytes]:
    found = [
        path
        for path in folder.rglob("*")
        if path.is_file() and path.name in ("model.safetensors", "config.yaml")
    ]
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def everything() -> list[Path]:
    return sorted(Path().rglob("*"))


def test_runs_are_trained_in_order_and_skipped_on_resume(
    written: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(RUNS, HEAD)
    assert main(["run", str(path)]) == 0
    shown = capsys.readouterr()
    assert "one/a" in shown.out
    assert "note: vars.spare is used nowhere" in shown.err
    assert "weights from runs/study/one/a/checkpoints/step-00000003" in shown.err
    first, second = (
        json.loads(Path(f"runs/study/one/{name}/result.json").read_text()) for name in "ab"
    )
    assert (first["steps"], second["steps"]) == (3, 2)
    assert [check["name"] for check in second["checks"]] == ["validation_loss"]
    assert load_run(Path("runs/study/one/b")).config.phases[0].options.lr == 0.002

    before = files(Path("runs"))
    assert main(["run", str(path)]) == 2
    assert "arb run study.yaml --run-dir runs/study --resume" in capsys.readouterr().err
    assert main(["run", str(path), "--resume"]) == 0
    assert capsys.readouterr().out.count("finished already") == 2
    assert files(Path("runs")) == before

    # A changed threshold checks the model again without training it.
    path.write_text(path.read_text().replace("max: 50", "max: 0.5"))
    assert main(["run", str(path), "--resume"]) == 1
    assert "runs/study/one/b: failed checks: validation_loss" in capsys.readouterr().err
    assert files(Path("runs")) == before
    # Changed training is refused, because another run is there.
    path.write_text(path.read_text().replace("lr: 0.002", "lr: 0.003"))
    assert main(["run", str(path), "--resume"]) == 1
    assert "phases[0].lr: 0.002 there, 0.003 here" in capsys.readouterr().err


def test_stopped_manifest_resumes_bitwise(
    written: Write, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(RUNS, HEAD)
    assert main(["run", str(path), "--run-dir", "whole"]) == 0
    from arb_ternary_train.context import TrainingContext

    kept = TrainingContext.record_step

    def stopping(self: TrainingContext, *arguments: object, **more: object) -> None:
        kept(self, *arguments, **more)  # type: ignore[arg-type]
        if self.config.name == "one-b":
            self.request_stop("a test")

    monkeypatch.setattr(TrainingContext, "record_step", stopping)
    assert main(["run", str(path), "--run-dir", "parts", "--target", "one"]) == 130
    assert "arb run study.yaml --target one --run-dir parts --resume" in capsys.readouterr().err
    monkeypatch.setattr(TrainingContext, "record_step", kept)
    assert main(["run", str(path), "--run-dir", "parts", "--resume"]) == 0
    whole = files(Path("whole"))
    parts = files(Path("parts"))
    assert len(parts) == len(whole) + 1  # the checkpoint of the stop
    assert {name: parts[name] for name in whole} == whole


def test_failed_check_ends_the_manifest(written: Write, capsys: pytest.CaptureFixture[str]) -> None:
    runs = RUNS.replace('lr: "${lr}"}}', "lr: 1.0}, verify: {type: validation_loss, max: 0.1}}")
    assert main(["run", str(written(runs, HEAD)), "--json"]) == 1
    shown = capsys.readouterr()
    assert "runs/study/one/a: failed checks: validation_loss" in shown.err
    assert [entry["run"] for entry in json.loads(shown.out)] == ["a"]
    assert Path("runs/study/one/a/result.json").is_file()
    assert not Path("runs/study/one/b").exists()


def test_dry_run_writes_nothing(written: Write, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(RUNS, HEAD)
    before = everything()
    assert main(["run", str(path), "--dry-run", "--target", "quick", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert everything() == before
    first = shown[0]
    assert (first["target"], first["run"], first["directory"]) == (
        "one",
        "a",
        "runs/study-quick/one/a",
    )
    # A decoder of one block of width 16 over 256 bytes: 4 * 16 * 16 of attention and 2 * 16 * 64 of
    # relu2 are ternary; embedding and head, the pre-norms, the final norm are float.
    assert first["layers"] == 1
    assert first["ternary_weights"] == 4 * 16 * 16 + 2 * 16 * 64
    assert first["float_parameters"] == 2 * 256 * 16 + 3 * 16
    assert first["gradient_bytes"] == 4 * first["float_parameters"]
    assert first["optimizer_bytes"] >= 8 * first["float_parameters"]
    (phase,) = first["phases"]
    assert (phase["steps"], phase["tokens"]) == (3, 3 * 2 * 8)
    assert 0 < phase["seconds"] < 60


def test_dry_run_counts_tokens_of_growing_batches(written: Write) -> None:
    runs = RUNS.replace("steps: 3,", "steps: 8,").replace(
        "block_size: 8,", "block_size: 8, batch_doublings: [0.5, 0.75],"
    )
    first, _ = plan(read_manifest(written(runs, HEAD)), Path("out"), dry=True, files=Path)
    # Four steps of two samples of eight tokens, two of four, two of eight.
    assert forecast(first.config, probe=False).phases[0].tokens == 64 + 64 + 128


def test_no_probe_trains_nothing(
    written: Write, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("arb_ternary_manifests.dry_run.train", lambda *_: pytest.fail("trained"))
    path = written(RUNS.replace("block_size: 8,", "block_size: 8, device: mps,"), HEAD)
    assert main(["run", str(path), "--dry-run", "--no-probe"]) == 0
    shown = capsys.readouterr().out
    assert "phase standard" in shown
    assert "3 steps, 48 tokens\n" in shown
    assert "device mps: Metal is not available here" in shown


def test_dry_run_of_a_model_larger_than_memory(
    written: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    big = HEAD.replace(
        "SYSTEM",
        "{ref: system.language_model, config: {width: 16384, layers: 4, heads: 64, "
        "max_length: 512, group_size: 128, float_parts: [embedding, head, norms]}}",
    )
    assert main(["run", str(written(RUNS, big)), "--dry-run", "--no-probe", "--json"]) == 0
    first = json.loads(capsys.readouterr().out)[0]
    assert first["ternary_weights"] == 4 * (4 + 8) * 16384**2
    assert first["float_parameters"] == 2 * 256 * 16384 + (2 * 4 + 1) * 16384
    assert first["optimizer_bytes"] == 8 * first["float_parameters"] + 4 * (2 + 2 * 4 + 1)


@pytest.mark.parametrize(
    ("flags", "message"), [(["--no-probe"], "--no-probe"), (["--dry-run", "--resume"], "--resume")]
)
def test_contradicting_flags_are_refused(
    written: Write, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert main(["run", str(written(RUNS, HEAD)), *flags]) == 2
    assert f"error: {message}: " in capsys.readouterr().err
