"""A resume that cannot read a checkpoint does not begin again."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from arb_ternary.cli.main import main
from arb_ternary.errors import CheckpointError, UsageProblem
from arb_ternary_train.directory import RunDirectory


@pytest.fixture
def run(tiny: Any) -> RunDirectory:
    """A finished run with two checkpoints."""
    directory: RunDirectory
    directory, _ = tiny.run("run")
    assert len(list(directory.checkpoints.glob("step-*"))) == 2
    return directory


def content(folder: Path) -> dict[str, bytes]:
    files = {path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def flip_a_bit(folder: Path) -> None:
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))


def make_newer(folder: Path) -> None:
    file = folder / "manifest.json"
    body = json.loads(file.read_text())
    file.write_text(json.dumps({**body, "version": 99}))


@pytest.mark.parametrize("damage", [flip_a_bit, make_newer])
def test_if_no_checkpoint_can_be_read_nothing_is_touched(
    damage: Callable[[Path], None], run: RunDirectory, tiny: Any
) -> None:
    for folder in run.checkpoints.glob("step-*"):
        damage(folder)
    before = content(run.path)
    with pytest.raises(CheckpointError):
        tiny.run("run", resume="auto")
    assert content(run.path) == before


def test_every_damaged_file_is_named(run: RunDirectory, tiny: Any) -> None:
    folders = sorted(run.checkpoints.glob("step-*"))
    for folder in folders:
        flip_a_bit(folder)
    with pytest.raises(CheckpointError) as raised:
        tiny.run("run", resume="auto")
    for folder in folders:
        assert f"{folder}/model.safetensors: tensor " in raised.value.hint
    assert "--restart" in raised.value.hint


def test_a_newer_version_is_not_skipped(run: RunDirectory, tiny: Any) -> None:
    make_newer(max(run.checkpoints.glob("step-*")))
    before = content(run.path)
    with pytest.raises(CheckpointError, match="checkpoint format version 99"):
        tiny.run("run", resume="auto")
    assert content(run.path) == before


@pytest.mark.parametrize("code", [errno.ESTALE, errno.EACCES, errno.EIO])
def test_a_refusal_of_the_system_is_no_damage(
    code: int, run: RunDirectory, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest = max(run.checkpoints.glob("step-*"))
    before = content(run.path)
    read_text = Path.read_text

    def refuse(self: Path, *arguments: Any, **options: Any) -> str:
        if self == newest / "manifest.json":
            raise OSError(code, os.strerror(code))
        return read_text(self, *arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_text", refuse)
        with pytest.raises(
            CheckpointError, match=f"manifest.json: cannot be read: {os.strerror(code)}"
        ):
            tiny.run("run", resume="auto")
    assert content(run.path) == before


def test_a_file_in_place_of_the_checkpoints_is_named(run: RunDirectory, tiny: Any) -> None:
    aside = run.path / "kept"
    run.checkpoints.rename(aside)
    run.checkpoints.write_text("")
    with pytest.raises(CheckpointError, match="checkpoints: cannot be read: Not a directory"):
        tiny.run("run", resume="auto")


def test_restart_sets_the_old_run_aside_whole(
    run: RunDirectory, tiny: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    before = content(run.path)
    for name in ("run.old-1", "run.old-2"):
        command = ["train", str(tiny.file), "--run-dir", str(run.path), "--restart"]
        assert main(command) == 0
        assert content(run.path.with_name(name))["config.yaml"] == before["config.yaml"]
    assert content(run.path.with_name("run.old-1")) == before
    assert content(run.path)["metrics.jsonl"] == before["metrics.jsonl"]
    assert main([*command, "--resume"]) == 2
    assert "--restart cannot be combined with --resume" in capsys.readouterr().err


def test_restart_refuses_while_another_process_trains(run: RunDirectory, tiny: Any) -> None:
    with run.locked(), pytest.raises(UsageProblem, match="another process is training"):
        tiny.run("run", restart=True)
    assert run.exists()


def test_metrics_of_an_attempt_without_a_checkpoint_are_kept(run: RunDirectory, tiny: Any) -> None:
    before = run.metrics_file.read_bytes()
    for folder in run.checkpoints.glob("step-*"):
        folder.rename(run.path / folder.name)
    tiny.run("run", resume="auto")
    assert (run.path / "metrics.before.jsonl").read_bytes() == before
    assert run.metrics_file.read_bytes() == before
