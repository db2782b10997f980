"""The optimizers of float parameters in runs: under split and gqc, and with a kill."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve

from arb_ternary import hookimpl
from arb_ternary.errors import ArbError, ConfigError
from arb_ternary_testing.interruption import Crash, interruption
from arb_ternary_train import build
from arb_ternary_train.config import RunConfig
from arb_ternary_train.loading import load_config
from arb_ternary_train.progress import Silent
from arb_ternary_train.runner import RunRequest, train

CONFIG = """
name: tiny
seed: 3
data: {{name: text, path: {text}, tokenizer: bytes}}
model: {{name: decoder, width: 16, layers: 1, heads: 2, max_length: 8, float_parts: {parts}}}
optimizer: {optimizer}
checkpoint: {{every: 3, keep: 9}}
phases: [{{name: standard, steps: 10, batch_size: 2, block_size: 8, warmup_steps: 2, eval_every: 0,
    {phase}}}]
"""
MIXED = "[norms, embedding, head], group_size: 32"
FLOATS = "[norms, embedding, head, linears]"
NOWCASTING = "{name: nowcasting, every: 4, window: 3, spacing: 1, horizon: 2}"
NOISY = "{name: adagc, warmup: 3, inner: {name: gradient_noise, inner: " + NOWCASTING + "}}"
SWITCHING = "{name: swats, switch_threshold: 1.0, min_steps_before_switch: 3}"


def split(floats: str) -> str:
    return "{name: split, ternary: {name: sign_votes, accum_threshold: 2}, float: " + floats + "}"


RUNS = {
    "swats": (SWITCHING, FLOATS, "gradient_accumulation_steps: 2"),
    "lion and clipping": (split("lion"), MIXED, "grad_clip: 0.5, lr: 0.003"),
    "wrappers under split": (split(NOISY), MIXED, "dtype: bfloat16"),
    "wrappers under gqc": (
        "{name: gqc.sbc, initial_logical_batch_size: 2, inner: "
        + split("{name: gradient_smoother, inner: " + SWITCHING + "}")
        + "}",
        MIXED,
        "lr: 0.01",
    ),
}


def config(folder: Path, optimizer: str, parts: str = MIXED, phase: str = "") -> RunConfig:
    (folder / "text.txt").write_text("to be or not to be, that is the question. " * 30)
    text = CONFIG.format(
        text=folder / "text.txt",
        optimizer=optimizer,
        parts=parts,
        phase=phase or "lr_schedule: cosine",
    )
    (folder / "tiny.yaml").write_text(text)
    return load_config(folder / "tiny.yaml").config


def run(config: RunConfig, directory: Path, **request: Any) -> dict[str, bytes]:
    train(config, RunRequest(directory=directory, reporter=Silent, **request))
    found = [
        path for pattern in ("metrics.jsonl", "checkpoints/*/*") for path in directory.glob(pattern)
    ]
    return {str(path.relative_to(directory)): path.read_bytes() for path in sorted(found)}


@pytest.mark.parametrize("name", RUNS)
def test_killed_run_resumes_bitwise(name: str, tmp_path: Path) -> None:
    made = config(tmp_path, *RUNS[name])
    whole = run(made, tmp_path / "whole")
    # the newest checkpoint is that of step 6, within a window of snapshots
    with pytest.raises(Crash):
        run(evolve(made, trackers=(interruption(7, "crash"),)), tmp_path / "killed")
    assert run(made, tmp_path / "killed", resume="auto") == whole


def test_metrics_contain_optimizer_statistics(tmp_path: Path) -> None:
    files = run(config(tmp_path, NOISY, FLOATS), tmp_path / "run")
    steps = [json.loads(line) for line in files["metrics.jsonl"].splitlines() if b'"train"' in line]
    assert [step["jumps"] for step in steps] == [0, 0, 0, 1, 1, 1, 1, 2, 2, 2]
    assert [step["noise"] for step in steps] == pytest.approx(
        [(0.01 / n**0.55) ** 0.5 for n in range(1, 11)]
    )
    assert all(step["clipped"] >= 0 and step["grad_norm"] > 0 for step in steps)
    files = run(config(tmp_path, *RUNS["swats"]), tmp_path / "swats")
    steps = [json.loads(line) for line in files["metrics.jsonl"].splitlines() if b'"train"' in line]
    assert [step["sgd_groups"] for step in steps] == [0, 0, 0, *[steps[-1]["sgd_groups"]] * 7]
    assert steps[-1]["sgd_groups"] > 0


class Poison:
    """Makes the gradient of a float parameter NaN while the loss is finite, at some of its backward
    passes.
    """

    def __init__(self, at: range) -> None:
        self.at = at
        self.passes = 0

    @hookimpl
    def arb_phase_start(self, context: Any) -> None:
        def spoil(gradient: torch.Tensor) -> torch.Tensor:
            self.passes += 1
            return gradient * float("nan") if self.passes in self.at else gradient

        next(context.model.parameters()).register_hook(spoil)


def spoilt(at: range, monkeypatch: pytest.MonkeyPatch) -> None:
    observers: Mapping[str, Any] = {"poison": Poison(at)}
    monkeypatch.setattr(build, "build_observers", lambda config: build.RunObservers(observers))


def test_nonfinite_gradient_is_skipped_in_every_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer = split("{name: adagc, warmup: 3}")
    spoilt(range(4, 6), monkeypatch)
    files = run(config(tmp_path, optimizer), tmp_path / "run")
    records = [json.loads(line) for line in files["metrics.jsonl"].splitlines()]
    assert [each["what"] for each in records if each["event"] == "skip"] == ["gradient"] * 2
    assert sum(each["event"] == "train" for each in records) == 10
    assert all(each["loss"] < 10 for each in records if each["event"] == "train")


def test_run_with_only_nonfinite_gradients_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer = split("{name: gradient_smoother}")
    spoilt(range(2, 99), monkeypatch)
    with pytest.raises(ArbError, match="step 2: 4 micro-batches in a row had no finite gradient"):
        run(config(tmp_path, optimizer, MIXED, "max_skipped: 4"), tmp_path / "run")


@pytest.mark.parametrize(
    ("optimizer", "phase", "path", "text"),
    [
        ("{name: nowcasting}", "", "optimizer", "integers; there is nothing to extrapolate"),
        ("{name: adagc}", "", "optimizer", "'adagc' cannot train ternary modules"),
        (
            split("{name: swats, adam_lr: 0.1}"),
            "lr: 0.01",
            "optimizer.float.adam_lr",
            "has no effect because every phase that trains has an 'lr' of its own",
        ),
        (
            split("{name: adagc, inner: {name: gqc.sbc, inner: adamw}}"),
            "grad_clip: 1.0",
            "phases[0].grad_clip",
            "decides over sums of several gradients",
        ),
        (
            split("{name: sgd, momentum: 0, nesterov: true}"),
            "",
            "optimizer.float.nesterov",
            "needs a 'momentum' above 0",
        ),
    ],
)
def test_contradictions_are_faults_of_the_config(
    optimizer: str, phase: str, path: str, text: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        config(tmp_path, optimizer, MIXED, phase)
    assert any(
        path in str(fault) and text in str(fault) for fault in str(caught.value).splitlines()
    ), str(caught.value)


def test_a_bad_gradient_does_not_pass_a_wrapper_that_takes_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backward = torch.Tensor.backward
    calls = 0

    def spoil(self: torch.Tensor, *arguments: Any, **options: Any) -> None:
        nonlocal calls
        calls += 1
        backward(self * (math.inf if calls == 4 else 1.0), *arguments, **options)

    monkeypatch.setattr(torch.Tensor, "backward", spoil)
    files = run(config(tmp_path, NOWCASTING, FLOATS), tmp_path / "run")
    events = [json.loads(line) for line in files["metrics.jsonl"].splitlines()]
    assert [each["what"] for each in events if each["event"] == "skip"] == ["gradient"]
    losses = [each["loss"] for each in events if each["event"] == "train"]
    assert len(losses) == 10
    assert all(isinstance(loss, float) for loss in losses)
