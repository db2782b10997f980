"""A reader follows few functions from ``arb train`` to the backward pass and to a flip."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from arb_ternary.cli.main import main
from arb_ternary.ternary import module as ternary_module

CONFIG = """
name: frames
data: {{name: text, path: {text}, tokenizer: bytes}}
model: {{name: decoder, width: 16, layers: 1, heads: 2, max_length: 8, group_size: 32,
  float_parts: [norms]}}
optimizer: split
checkpoint: {{every: 0}}
phases: [{{name: standard, steps: 1, batch_size: 2, block_size: 8, eval_every: 0}}]
"""


def our_frames() -> list[str]:
    """Return the functions of this project between the program and the caller, outermost first."""
    frame = sys._getframe(2)
    names: list[str] = []
    while frame is not None:
        names.append(f"{frame.f_globals['__name__']}.{frame.f_code.co_qualname}")
        frame = frame.f_back  # type: ignore[assignment]
    inside = names[: names.index("arb_ternary.cli.main.main")]
    ours = [name for name in inside if name.partition(".")[0].startswith("arb_ternary")]
    command = next(index for index, name in enumerate(ours) if ".cli." in name)
    return ours[command::-1]


def test_train_reaches_backward_and_flips_in_few_frames(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be, that is the question. " * 30)
    (tmp_path / "config.yaml").write_text(CONFIG.format(text=text))
    to_backward: list[list[str]] = []
    to_flip: list[list[str]] = []
    backward = torch.Tensor.backward
    kernel = ternary_module.kernel

    def recorded_backward(self: torch.Tensor, *arguments: Any, **options: Any) -> None:
        to_backward.append(our_frames())
        backward(self, *arguments, **options)

    def recorded_kernel(backend: str, op: str) -> Callable[..., Any]:
        found = kernel(backend, op)

        def recorded(*arguments: Any) -> Any:
            to_flip.append([*our_frames(), f"{backend}: {op}"])
            return found(*arguments)

        return recorded if op == "apply_scaled_votes" else found

    monkeypatch.setattr(torch.Tensor, "backward", recorded_backward)
    monkeypatch.setattr(ternary_module, "kernel", recorded_kernel)
    assert main(["train", str(tmp_path / "config.yaml"), "--run-dir", str(tmp_path / "run")]) == 0
    (stack,) = to_backward
    assert len(stack) <= 5, "\n".join(stack)
    assert to_flip
    assert all(len(stack) <= 9 for stack in to_flip), "\n".join(to_flip[0])
