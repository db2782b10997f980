"""Whole training runs: under ``exact: true`` the bytes of the torch backend, else a loss like its
own.
"""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import frozen
from safetensors.torch import load

from arb_ternary import TernaryEmbedding, TernaryLinear
from arb_ternary.cli.main import main
from arb_ternary.environment import for_child
from arb_ternary.ternary import module
from arb_ternary.ternary.models import seed_votes, ternary_modules
from arb_ternary_train.loading import load_config
from arb_ternary_train.metrics import read_metrics
from arb_ternary_train.progress import Silent
from arb_ternary_train.runner import RunRequest, train
from arb_ternary_train.update import ternary_update
from arb_ternary_votes.sign_votes import SignVotes

pytestmark = pytest.mark.interpreted

#: Of a whole run: the interpreter is slow. The fifty steps are those of two layers.
STEPS = 3
FIFTY = 50
#: Widths that fill no block and no group, a rule that learns exponents, and rates at which a few
#: steps flip many trits.
CONFIG = """
name: exact
exact: true
seed: 5
data: {{name: text, path: {text}, tokenizer: characters}}
model:
  {{name: decoder, width: 40, layers: 1, heads: 2, feed_forward: 72, max_length: 16,
      group_size: 32}}
optimizer: {optimizer}
checkpoint: {{every: 1000, keep: 1}}
phases:
  - {{name: standard, steps: {steps}, batch_size: 2, block_size: 12, eval_every: 3,
      eval_batches: 1}}
"""
OPTIMIZERS = {
    "scaled_votes": "{name: scaled_votes, lr: 0.5, exponent_rate: 0.5}",
    "sign_votes": "{name: sign_votes, accum_threshold: 2, e_accum_threshold: 2}",
}
#: A norm is a float sum of squares, in an order of each backend's own; nothing but the log reads it
#: here.
NORM_TOLERANCE = 2.0**-18


@frozen
class Trained:
    """What a run left behind: weights, exponents and accumulators; the optimizer's state; what was
    logged.
    """

    model: bytes
    state: bytes
    metrics: tuple[dict[str, Any], ...]

    @property
    def norms(self) -> list[float]:
        return [record["grad_norm"] for record in self.metrics if record["event"] == "train"]

    @property
    def rest(self) -> list[dict[str, Any]]:
        """Everything that was logged but the norms: losses, flips, rates."""
        return [
            {key: value for key, value in record.items() if key != "grad_norm"}
            for record in self.metrics
        ]


Run = Callable[[str, str], Trained]
interpreted = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the interpreter is for machines without a GPU"
)


def _text(folder: Path) -> Path:
    generator = random.Random(0)
    text = folder / "text.txt"
    text.write_text(
        " ".join(generator.choice(["to", "be", "or", "not", "that", "is"]) for _ in range(900))
    )
    return text


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Trains with an optimizer on a backend."""
    folder = tmp_path_factory.mktemp("runs")
    text = _text(folder)

    def start(optimizer: str, backend: str) -> Trained:
        config = folder / f"{optimizer}.yaml"
        config.write_text(CONFIG.format(text=text, optimizer=OPTIMIZERS[optimizer], steps=STEPS))
        directory = folder / f"{optimizer}-{backend}-{len(list(folder.iterdir()))}"
        train(
            load_config(config).config,
            RunRequest(directory=directory, backend=backend, reporter=Silent),
        )
        (last,) = directory.glob("checkpoints/step-*")
        kept = [(last / f"{name}.safetensors").read_bytes() for name in ("model", "state")]
        return Trained(*kept, tuple(read_metrics(directory / "metrics.jsonl")))

    return start


def _fifty_steps(backend: str) -> tuple[list[float], int, dict[str, torch.Tensor]]:
    """Losses, flips, and the state in its form at rest, after fifty steps of a lookup and a
    linear.
    """
    torch.manual_seed(0)
    modules = {
        "table": TernaryEmbedding(11, 40, group_size=32, gradients="int8", backend=backend),
        "head": TernaryLinear(40, 11, group_size=32, gradients="int8", backend=backend),
    }
    model = torch.nn.Sequential(modules["table"], modules["head"])
    seed_votes(model, 7)
    optimizer = SignVotes(modules, accum_threshold=3, e_accum_threshold=4)
    generator = torch.Generator().manual_seed(1)
    losses = []
    flips = 0
    for _ in range(FIFTY):
        ids = torch.randint(0, 11, (24,), generator=generator)
        loss = torch.nn.functional.cross_entropy(model(ids), (ids * 3 + 1) % 11)
        flips += ternary_update(model, optimizer, loss).flips
        losses.append(loss.item())
    return (
        losses,
        flips,
        {
            name: value
            for name, value in model.state_dict().items()
            if isinstance(value, torch.Tensor)
        },
    )


# The exact run below compares the same bytes.
@pytest.mark.extended
@interpreted
def test_fifty_exact_steps_leave_the_bits_of_the_torch_backend() -> None:
    wanted_losses, wanted_flips, wanted = _fifty_steps("torch")
    losses, flips, state = _fifty_steps("triton")
    assert wanted_flips > 100
    assert wanted_losses[-1] != wanted_losses[-2]
    assert losses == wanted_losses
    assert flips == wanted_flips
    assert state.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(state[name], value), name
    spreads = [
        int(value.max()) - int(value.min())
        for name, value in wanted.items()
        if name.endswith(".exponent")
    ]
    assert max(spreads) > 0, "no exponent moved"


@interpreted
@pytest.mark.parametrize(
    "optimizer", ["scaled_votes", pytest.param("sign_votes", marks=pytest.mark.slow)]
)
def test_an_exact_run_has_the_bytes_of_the_torch_backend(optimizer: str, run: Run) -> None:
    wanted = run(optimizer, "torch")
    model = load(wanted.model)
    assert any(bool(model[name].any()) for name in model if name.endswith(".votes")), (
        "equal bytes would say little"
    )
    got = run(optimizer, "triton")
    assert got.rest == wanted.rest
    assert got.model == wanted.model
    assert got.state == wanted.state
    assert got.norms == pytest.approx(wanted.norms, rel=NORM_TOLERANCE)


@interpreted
def test_run_moved_to_the_device_has_the_bytes_of_torch(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: the model is made on the CPU, which the kernels do not serve, and moved to the
    device.
    """
    moved: list[str] = []
    monkeypatch.setattr(module, "serves", lambda name, device: bool(moved))

    def move(model: torch.nn.Module, seed: int) -> None:
        moved.extend(each.backend for _, each in ternary_modules(model))
        seed_votes(model, seed)

    monkeypatch.setattr("arb_ternary_train.build.seed_votes", move)
    wanted = run("sign_votes", "torch")
    moved.clear()
    got = run("sign_votes", "triton")
    assert set(moved) == {"torch"}
    assert (got.model, got.state) == (wanted.model, wanted.state)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA or ROCm device")
def test_a_module_is_made_on_the_cpu_and_computes_on_the_gpu() -> None:
    layer = TernaryLinear(200, 24, group_size=32, gradients="int8", backend="triton")
    trits = layer.trits()
    x = torch.randn(5, 200)
    assert layer.backend == "torch"
    layer.to("cuda")
    assert layer.backend == "triton"
    layer(x.cuda()).sum().backward()
    assert torch.equal(layer.trits().cpu(), trits)
    assert bool(layer.to("cpu").logical_votes().any())
    assert layer.backend == "torch"


# --- the demo

DEMO = Path(__file__).parents[3] / "docs" / "examples" / "demo.yaml"
#: The demo orthogonalises gradients, which are floats.
EXACT = ("exact=true", "optimizer.orthogonal=false")
#: The demo, small: its recipe on a narrower model, a short text and a few steps.
TINY = [
    "model.width=32",
    "model.layers=1",
    "model.heads=2",
    "model.feed_forward=64",
    "model.max_length=16",
    "phases.0.steps=3",
    "phases.0.batch_size=2",
    "phases.0.block_size=16",
    "phases.0.eval_every=1000",
    "phases.0.warmup_steps=0",
    "checkpoint.every=1000",
    "optimizer.lr=1",
]


def _train_demo(folder: Path, name: str, *changes: str) -> list[str]:
    """The arguments of ``arb`` that train the tiny demo into ``folder / name``."""
    text = folder / "text.txt"
    if not text.exists():
        _text(folder)
    data = f"data={{name: text, path: {text}, tokenizer: bytes}}"
    overrides = [part for change in (data, *TINY, *changes) for part in ("-o", change)]
    return ["train", str(DEMO), "--run-dir", str(folder / name), *overrides]


def _left(directory: Path) -> dict[str, bytes]:
    (last,) = directory.glob("checkpoints/step-*")
    return {name: (last / f"{name}.safetensors").read_bytes() for name in ("model", "state")}


def _loss(directory: Path) -> float:
    return float(json.loads((directory / "result.json").read_text())["validation_loss"])


@pytest.mark.extended
@pytest.mark.skipif(not DEMO.exists(), reason="the demo is not beside this package")
def test_demo_from_the_command_line_has_the_bytes_of_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ARB_TERNARY_BACKEND", "torch")
    assert main(_train_demo(tmp_path, "torch", *EXACT)) == 0
    command = [
        sys.executable,
        "-m",
        "arb_ternary.cli.main",
        *_train_demo(tmp_path, "triton", *EXACT),
    ]
    environment = for_child(TRITON_INTERPRET="1", ARB_TERNARY_BACKEND="triton")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    recorded = json.loads((tmp_path / "triton" / "run.json").read_text())
    assert recorded["backend"] == {"name": "triton", "source": "ARB_TERNARY_BACKEND"}
    assert (
        sum(
            each["flips"]
            for each in read_metrics(tmp_path / "torch" / "metrics.jsonl")
            if "flips" in each
        )
        > 0
    )
    assert _left(tmp_path / "triton") == _left(tmp_path / "torch")


@interpreted
@pytest.mark.skipif(not DEMO.exists(), reason="the demo is not beside this package")
def test_demo_with_float_gradients_ends_within_the_spread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ARB_TERNARY_BACKEND", "torch")
    for seed in range(3):
        assert main(_train_demo(tmp_path, f"torch-{seed}", f"seed={seed}")) == 0
    losses = [_loss(tmp_path / f"torch-{seed}") for seed in range(3)]
    monkeypatch.setenv("ARB_TERNARY_BACKEND", "triton")
    assert main(_train_demo(tmp_path, "triton", "seed=0")) == 0
    loss = _loss(tmp_path / "triton")
    assert math.isfinite(loss)
    assert abs(loss - losses[0]) <= max(losses) - min(losses)
