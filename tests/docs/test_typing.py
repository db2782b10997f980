"""A user's script passes ``mypy --strict``, and a mistake in it is found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mypy")

SCRIPT = '''\
"""Train a small model, write with it, and make a model of one's own ternary."""

from pathlib import Path

import torch
from torch import nn

import arb_ternary
from arb_ternary.errors import ArbError
from arb_ternary_chat.model import Model
from arb_ternary_train.run import Run, train


def trained(folder: Path, steps: int) -> Run:
    config = {
        "data": "shakespeare",
        "model": {"name": "decoder", "architecture": "qwen3", "width": 64, "layers": 1},
        "optimizer": "scaled_votes",
        "phases": [{"name": "standard", "steps": steps, "lr_schedule": "constant"}],
    }
    run = train(config, {"phases.0.batch_size": 2}, run_dir=folder, seed=1)
    run.plot(metric="loss").save(folder / "loss.png")
    return run


def written(folder: Path) -> str:
    run = Run(folder).resume({"phases.0.steps": 20})
    model: Model = arb_ternary.load_model(run.directory)
    return model.generate("To be", max_new_tokens=8) + run.generate("To be", max_new_tokens=8)


def fitted(inputs: torch.Tensor, targets: torch.Tensor) -> float:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    print(arb_ternary.ternarize(model, exclude=("2",)))
    optimizer: torch.optim.Optimizer = arb_ternary.make_optimizer(model, lr=0.1)
    loss = nn.functional.cross_entropy(model(inputs), targets)
    loss.backward()  # type: ignore[no-untyped-call]  # torch has no type for it
    optimizer.step()
    return loss.item()


try:
    print(trained(Path("run"), 10).metrics, written(Path("run")))
except ArbError as error:
    print(error.what, error.hint)
'''


def test_a_script_passes_strict_and_a_mistake_is_found(tmp_path: Path) -> None:
    mistaken = SCRIPT.replace('"To be", max_new_tokens=8) + run', "8) + run")
    mistaken = mistaken.replace("run_dir=folder, seed=1", "run_dir=7")
    for name, text in (("script", SCRIPT), ("mistaken", mistaken)):
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache")]
    # Outside the clone: its configuration has nothing to say here.
    done = subprocess.run(
        [*command, "script.py", "mistaken.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    *errors, summary = done.stdout.splitlines()
    assert summary == "Found 2 errors in 1 file (checked 2 source files)", done.stdout
    assert 'error: Argument "run_dir" to "train"' in errors[0]
    assert 'error: Argument 1 to "generate" of "Model"' in errors[1]
