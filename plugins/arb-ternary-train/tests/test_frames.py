"""How far it is from the command to the gradient."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import pytest
import torch

from arb_ternary.cli.main import main


def ours(frame: traceback.FrameSummary) -> bool:
    """Whether a frame belongs to one of this project's packages."""
    return any(part.startswith("arb_ternary") for part in Path(frame.filename).parts)


def test_train_reaches_backward_within_five_frames(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stacks: list[list[str]] = []
    backward = torch.Tensor.backward

    def looking(self: torch.Tensor, *arguments: Any, **options: Any) -> None:
        stacks.append(
            [
                f"{Path(each.filename).name}:{each.name}"
                for each in traceback.extract_stack()
                if ours(each)
            ]
        )
        backward(self, *arguments, **options)

    monkeypatch.setattr(torch.Tensor, "backward", looking)
    steps = ["-o", "phases.0.steps=1", "-o", "phases.0.warmup_steps=0"]
    assert main(["train", str(tiny.file), *steps, "--run-dir", str(tmp_path / "run")]) == 0
    (stack,) = stacks
    shell, *five = stack
    assert shell == "main.py:main"
    assert five == [
        "train.py:train",
        "runner.py:train",
        "standard.py:run",
        "loop.py:train_microbatch",
        "loop.py:draw",
    ]
