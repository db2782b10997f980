"""From the command to the backward pass: a reader follows at most five functions of ours."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from arb_ternary.cli.main import main

CONFIG = """
name: frames
data: {{name: text, path: {text}, tokenizer: bytes}}
model: {{name: decoder, width: 16, layers: 1, heads: 2, max_length: 8, group_size: 32}}
optimizer: scaled_votes
checkpoint: {{every: 0}}
phases: [{{name: standard, steps: 1, batch_size: 2, block_size: 8, eval_every: 0}}]
"""


def test_at_most_five_frames_of_ours_stand_between_the_command_and_the_backward_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be, that is the question. " * 30)
    (tmp_path / "config.yaml").write_text(CONFIG.format(text=text))
    stacks: list[list[str]] = []
    backward = torch.Tensor.backward

    def recorded(self: torch.Tensor, *arguments: Any, **options: Any) -> None:
        frame = sys._getframe(1)
        names = []
        while frame is not None:
            names.append(f"{frame.f_globals['__name__']}.{frame.f_code.co_qualname}")
            frame = frame.f_back  # type: ignore[assignment]
        stacks.append(names)
        backward(self, *arguments, **options)

    monkeypatch.setattr(torch.Tensor, "backward", recorded)
    assert main(["train", str(tmp_path / "config.yaml"), "--run-dir", str(tmp_path / "run")]) == 0
    (stack,) = stacks
    inside = stack[: stack.index("arb_ternary.cli.main.main")]
    ours = [name for name in inside if name.partition(".")[0].startswith("arb_ternary")]
    command = next(index for index, name in enumerate(ours) if ".cli." in name)
    assert len(ours[: command + 1]) <= 5, "\n".join(reversed(ours))
