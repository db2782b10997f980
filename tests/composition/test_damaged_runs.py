"""Every file of a run, damaged in every way, gives every command an error that names the file."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from arb_ternary.cli.main import main

CONFIG = """
name: tiny
data: {name: text, path: text.txt, tokenizer: characters}
model: {name: decoder, width: 32, layers: 1, heads: 2, max_length: 16, architecture: qwen3}
optimizer: {name: scaled_votes}
checkpoint: {every: 2}
phases: [{name: standard, steps: 2, batch_size: 2, block_size: 8, warmup_steps: 0}]
"""
DEEP = "[" * 100_000


def text(content: str) -> Callable[[Path], None]:
    return lambda path: path.write_text(content)


def loop(path: Path) -> None:
    path.symlink_to(path.name)


def device(path: Path) -> None:
    path.symlink_to("/dev/full")


JSON = {
    "empty object": text("{}"),
    "list": text("[]"),
    "null": text("null"),
    "deep": text(DEEP),
    "no text": lambda path: path.write_bytes(b"\xff\xfe\x00"),
    "folder": Path.mkdir,
    "symlink loop": loop,
}
PLACES = {"folder": Path.mkdir, "symlink loop": loop, "device": device}
TRAIN = ("train", "run/config.yaml", "--run-dir", "run", "--resume")
GENERATE = ("generate", "run", "--max-new-tokens", "1")
EXPORT = ("export", "run", "out", "--format", "hf")
COMMANDS = {
    "train": TRAIN,
    "eval": ("eval", "run"),
    "generate": GENERATE,
    "export": EXPORT,
    "inspect": ("inspect", "run"),
    "plot": ("plot", "run", "--output", "out.png"),
}
#: The file, what is put in its place, the commands that use it.
CASES = [
    *(("run.json", JSON, command) for command in COMMANDS),
    ("tokenizer.json", JSON, "generate"),
    # The exporter says itself which kinds of tokenizer it can write.
    ("tokenizer.json", {name: JSON[name] for name in JSON if name != "empty object"}, "export"),
    # Without a result a curve has no baselines.
    ("result.json", {name: JSON[name] for name in JSON if name != "symlink loop"}, "plot"),
    *(("metrics.jsonl", PLACES, command) for command in ("train", "plot")),
    *((name, PLACES, "train") for name in ("logs/train.log", ".lock")),
    # A link is replaced.
    ("checkpoints/latest", {"folder": Path.mkdir}, "train"),
]
PARAMETERS = [
    pytest.param(file, damage, command, id=f"{file}-{name}-{command}")
    for file, damages, command in CASES
    for name, damage in damages.items()
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run and its text."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "text.txt").write_text("to be or not to be that is the question " * 60)
    (folder / "tiny.yaml").write_text(CONFIG)
    before = Path.cwd()
    os.chdir(folder)
    try:
        assert main(["train", "tiny.yaml", "--run-dir", "run"]) == 0
    finally:
        os.chdir(before)
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "run"


@pytest.mark.parametrize(("file", "damage", "command"), PARAMETERS)
def test_a_damaged_file_is_named(
    file: str,
    damage: Callable[[Path], None],
    command: str,
    run: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = run / file
    path.unlink(missing_ok=True)
    damage(path)
    weights = (run / "checkpoints/step-00000002/model.safetensors").read_bytes()
    code = main(list(COMMANDS[command]))
    printed = capsys.readouterr().err
    assert code in (1, 2, 3), printed
    assert "Traceback" not in printed
    assert file in printed.replace("\n", "")
    assert (run / "checkpoints/step-00000002/model.safetensors").read_bytes() == weights


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("damage", ["missing", "no text"])
def test_a_config_that_is_missing_or_no_text_is_named(
    damage: str, command: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = run / "config.yaml"
    config.unlink()
    if damage == "no text":
        config.write_bytes(b"\xff\xfe\x00")
    code = main(list(COMMANDS[command]))
    printed = capsys.readouterr().err
    if command == "plot" and code == 0:
        return  # a curve does not need it
    assert code in (1, 2, 3), printed
    assert "config.yaml" in printed.replace("\n", "")
