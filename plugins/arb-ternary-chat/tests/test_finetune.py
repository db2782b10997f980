"""Fine-tuning: what is written, that it learns, and that it goes on after any kill."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from arb_ternary import load_model
from arb_ternary.cli.main import main
from arb_ternary_chat import finetune
from arb_ternary_interchange.export import export_model
from arb_ternary_text.models import block_model
from arb_ternary_train.directory import RunDirectory
from arb_ternary_train.restore import load_run

STEPS = "6"


@pytest.fixture(scope="session")
def conversations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "chats.jsonl"
    lines = []
    for number in range(60):
        messages = [
            {"role": "user", "content": f"say {number % 10}"},
            {"role": "assistant", "content": f"{number % 10} it is, number {number}"},
        ]
        lines.append(json.dumps({"messages": messages}))
    path.write_text("\n".join(lines))
    return path


@pytest.fixture(scope="session")
def gguf(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    export_model(run, path, "gguf")
    return path


def weights(out: Path) -> bytes:
    """Return the weights of the last checkpoint."""
    checkpoints = sorted((out / "run" / "checkpoints").glob("step-*"))
    return (checkpoints[-1] / "model.safetensors").read_bytes()


def test_a_run_learns_conversations_and_arb_train_repeats_it(
    run: Path, conversations: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    command = ["finetune", str(run), str(conversations), "--out", str(out), "--steps", "30"]
    assert main([*command, "-o", "phases.0.batch_size=8"]) == 0
    captured = capsys.readouterr()
    assert f"talk to it: arb chat {out / 'run'}" in captured.out
    assert "30 steps of 8 x 64 tokens, about" in captured.err
    before = json.loads((out / "before.json").read_text())["loss"]
    after = json.loads((out / "run" / "result.json").read_text())["validation_loss"]
    assert after < before - 0.1
    again = ["train", str(out / "config.yaml"), "--init-from", str(run)]
    assert main([*again, "--run-dir", str(tmp_path / "again" / "run")]) == 0
    assert weights(tmp_path / "again") == weights(out)
    # Everything is there already.
    assert main([*command, "-o", "phases.0.batch_size=8"]) == 0
    assert f"loss {before:.4f} -> {after:.4f}" in capsys.readouterr().out


def test_a_gguf_file_comes_out_as_one_with_its_template(
    gguf: Path, conversations: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert main(["finetune", str(gguf), str(conversations), "--out", str(out), "--steps", "2"]) == 0
    tuned = load_model(out / "model.gguf")
    assert tuned.special == load_model(gguf).special
    assert tuned.generate([{"role": "user", "content": "x"}], max_new_tokens=3, temperature=0) != 0


@pytest.mark.parametrize("method", ["votes", "votes+float-ends"])
def test_a_packed_folder_with_a_float_embedding_is_trained(
    method: str, float_ends_run: Path, conversations: Path, tmp_path: Path
) -> None:
    """Models that others publish have a float embedding and float norms."""
    folder = tmp_path / "published"
    export_model(float_ends_run, folder, "hf", ["layout=packed"])
    out = tmp_path / "out"
    command = ["finetune", str(folder), str(conversations), "--out", str(out), "--steps", "8"]
    assert main([*command, "--method", method, "--lr", "0.5"]) == 0
    before = load_run(out / "start").model.state_dict()
    after = load_run(out / "run").model.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    floats = {name for name in changed if before[name].is_floating_point()}
    assert any(name.endswith("query.weight") for name in changed - floats)
    assert bool(floats) is (method == "votes+float-ends")
    assert load_model(out / "hf").special == load_model(folder).special
    # It is packed again: no weight takes more bytes than before.
    size, size_before = ((at / "model.safetensors").stat().st_size for at in (out / "hf", folder))
    assert size == size_before


def test_wrong_settings_are_named(
    run: Path,
    base_run: Path,
    conversations: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = str(tmp_path / "out")
    begin = ["finetune", str(run), str(conversations), "--out", out]
    assert main([*begin, "--steps", "2"]) == 0
    for options, message in (
        (["--steps", "3"], "begun with --steps 2, not 3"),
        (["--lr", "0.01"], "begun with --lr 0.05, not 0.01"),
        (["--eval-share", "0.3"], "begun with --eval-share 0.05, not 0.3"),
        (["--steps", "2", "--epochs", "2"], "exclude each other"),
        (["--lr", "fast"], "neither auto nor a number"),
    ):
        capsys.readouterr()
        assert main([*begin, *options]) == 2
        assert message in capsys.readouterr().err
    other = ["finetune", str(run), str(conversations), "--out", str(tmp_path / "other")]
    assert main([*other, "--method", "votes+float-ends"]) == 2
    assert "has no float parameters" in capsys.readouterr().err
    missing = ["finetune", str(run), str(tmp_path / "none.jsonl"), "--out", str(tmp_path / "x")]
    assert main(missing) == 1
    base = ["finetune", str(base_run), str(conversations), "--out", str(tmp_path / "base")]
    capsys.readouterr()
    assert main(base) == 1
    assert "has no chat_template" in capsys.readouterr().err


@pytest.mark.extended
def test_a_killed_fine_tuning_goes_on_to_the_same_bytes(
    gguf: Path, conversations: Path, tmp_path: Path
) -> None:
    def command(out: Path) -> list[str]:
        source = [str(gguf), str(conversations)]
        options = ["--steps", STEPS, "-o", "checkpoint.every=1"]
        return [
            sys.executable,
            "-m",
            "arb_ternary",
            "finetune",
            *source,
            "--out",
            str(out),
            *options,
        ]

    whole = tmp_path / "whole"
    subprocess.run(command(whole), check=True, capture_output=True)
    killed = tmp_path / "killed"
    moments = (
        killed / "start" / "run.json",
        killed / "config.yaml",
        killed / "before.json",
        killed / "run" / "checkpoints" / "step-00000003",
        killed / "run" / "result.json",
    )
    for moment in moments:
        process = subprocess.Popen(
            command(killed), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        while not moment.exists() and process.poll() is None:
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.wait()
    done = subprocess.run(command(killed), check=True, capture_output=True, text=True)
    assert weights(killed) == weights(whole)
    assert (killed / "model.gguf").read_bytes() == (whole / "model.gguf").read_bytes()
    assert not [path for path in killed.iterdir() if path.name.startswith(".")]
    assert RunDirectory(killed / "run").exists()
    assert "talk to it" in done.stdout


def test_a_large_model_recomputes_activations_already_when_a_step_is_timed(
    run: Path, conversations: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = []
    recompute = block_model.checkpoint

    def counted(block: Any, *arguments: Any, **options: Any) -> Any:
        blocks.append(block)
        return recompute(block, *arguments, **options)

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(finetune, "_LARGE", 1)
    monkeypatch.setattr(finetune, "train", stop)
    monkeypatch.setattr(block_model, "checkpoint", counted)
    asked = finetune.FineTuning(source=str(run), data=str(conversations), out=tmp_path / "out")
    with pytest.raises(KeyboardInterrupt):
        finetune.finetune(asked, print)
    assert len(blocks) == 2
