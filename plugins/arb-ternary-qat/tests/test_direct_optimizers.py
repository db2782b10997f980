"""``dqt`` and ``bop`` against numpy, in the kit's suite, and in a run."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from arb_ternary.counters.hashing import uniform
from arb_ternary.errors import ConfigError
from arb_ternary.ternary.models import seed_votes
from arb_ternary_qat.bop import Bop
from arb_ternary_qat.direct import DirectLinear
from arb_ternary_qat.dqt import DQT, stochastic_round
from arb_ternary_testing import OptimizerSuite
from arb_ternary_train.loading import load_config
from arb_ternary_train.runner import RunRequest, train


def regression(levels: str) -> nn.Module:
    model = nn.Sequential(DirectLinear(torch.randn(4, 64) / 8, levels=levels))  # type: ignore[arg-type]
    seed_votes(model, 5)
    return model


class DirectSuite(OptimizerSuite):
    levels: ClassVar = "ternary"

    def make_model(self, part: str) -> nn.Module:
        return regression(self.levels)


class TestDQT(DirectSuite):
    component = "dqt"
    parts = ("ternary",)
    options: ClassVar = {"lr": 0.003}


class TestDQTOfBytes(DirectSuite):
    component = "dqt"
    parts = ("int8",)
    levels = "int8"
    options: ClassVar = {"lr": 0.003, "weight_decay": 0.01}


class TestBop(DirectSuite):
    component = "bop"
    parts = ("ternary",)
    options: ClassVar = {"gamma": 0.05, "tau": 0.01}


class TestNormalisedBop(DirectSuite):
    component = "bop"
    parts = ("ternary",)
    options: ClassVar = {"gamma": 0.05, "tau": 0.3, "normalise": True, "sigma": 0.05}


# --- stochastic rounding


@pytest.mark.parametrize("value", [0.0, 0.25, -0.7, 3.141, -126.99, 1.0])
def test_mean_of_many_roundings_is_the_value(value: float) -> None:
    count = 1 << 18
    rounded = stochastic_round(torch.full((count,), value), 1, 2, 3)
    fraction = value - math.floor(value)
    assert set(rounded.tolist()) <= {math.floor(value), math.floor(value) + 1}
    # A Bernoulli mean: five standard deviations, and the 2**-24 grain of the noise and of float32.
    bound = 5 * math.sqrt(fraction * (1 - fraction) / count) + 2**-16
    assert abs(float(rounded.double().mean()) - value) <= bound


def test_integers_are_not_changed() -> None:
    x = torch.arange(-127, 128).float()
    assert all(torch.equal(stochastic_round(x, seed, 0, 0), x) for seed in range(50))


def with_gradient(
    levels: str, steps: int, *, rows: int = 6, columns: int = 40
) -> tuple[DirectLinear, list[Any]]:
    torch.manual_seed(1)
    layer = DirectLinear(torch.randn(rows, columns), levels=levels)  # type: ignore[arg-type]
    seed_votes(nn.ModuleDict({"layer": layer}), 9)
    return layer, [torch.randn(rows, columns) * 0.1 for _ in range(steps)]


@pytest.mark.parametrize("levels", ["ternary", "int8"])
def test_dqt_is_adamw_and_rounding(levels: str) -> None:
    layer, gradients = with_gradient(levels, 5)
    optimizer = DQT(
        {"layer": layer}, {"lr": 0.05, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    )
    weight = nn.Parameter(layer.dense_weight())
    torchs = torch.optim.AdamW([weight], lr=0.05, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for step, gradient in enumerate(gradients):
        with torch.no_grad():
            weight.copy_(layer.dense_weight())
        layer.gradient = gradient.clone()
        weight.grad = gradient.clone()
        before = layer.codes().clone()
        words = layer.control.tolist()
        outcome = optimizer.step()
        torchs.step()
        noise = uniform((6, 40), words[0], step << 20, words[2] * 8)
        assert words[1] == step
        target = (weight.detach() / layer.scale).clamp(-layer.limit, layer.limit)
        expected = torch.floor(target + noise)
        # Where the sum lies on a whole number but for rounding, either neighbour is right.
        near = ((target + noise) - (target + noise).round()).abs() < 1e-4
        assert torch.equal(layer.codes()[~near].float(), expected[~near])
        assert near.float().mean() < 0.02
        assert outcome.flips == int((layer.codes() != before).sum()) > 0
        assert outcome.grad_norm == pytest.approx(float(gradient.norm()), rel=1e-5)


def test_dqt_moves_weights_by_updates_below_one_code() -> None:
    layer = DirectLinear(torch.ones(200, 100), levels="ternary")
    optimizer = DQT(
        {"layer": layer}, {"lr": 0.1, "betas": (0.9, 0.95), "eps": 0.0, "weight_decay": 0.0}
    )
    layer.gradient = torch.ones(200, 100)
    optimizer.step()
    # The first update of AdamW is lr * sign(g): a tenth of a code, so that a tenth of the codes go
    # from 1 to 0.
    assert float(layer.codes().float().mean()) == pytest.approx(
        0.9, abs=5 * math.sqrt(0.09 / 20000)
    )


# --- bop


@pytest.mark.parametrize("normalise", [False, True])
def test_bop_flips_as_its_definition_in_numpy(normalise: bool) -> None:
    layer, gradients = with_gradient("ternary", 12)
    options = {
        "gamma": 0.1,
        "tau": 0.2 if normalise else 0.02,
        "normalise": normalise,
        "sigma": 0.2,
        "eps": 1e-10,
    }
    optimizer = Bop({"layer": layer}, {"lr": 1.0, **options})
    trits = layer.codes().numpy().astype(np.int64)
    m = np.zeros((6, 40))
    v = np.zeros((6, 40))
    total = 0
    for step, gradient in enumerate(gradients):
        rate = 1.0 if step < 6 else 0.5
        optimizer.param_groups[0]["lr"] = rate
        layer.gradient = gradient.clone()
        outcome = optimizer.step()
        g = gradient.double().numpy()
        m = (1 - 0.1 * rate) * m + 0.1 * rate * g
        v = (1 - 0.2) * v + 0.2 * g * g
        signal = m / (np.sqrt(v) + 1e-10) if normalise else m
        moved = np.clip(
            trits - np.sign(m).astype(np.int64) * (np.abs(signal) >= options["tau"]), -1, 1
        )
        assert outcome.flips == (moved != trits).sum()
        total += outcome.flips
        trits = moved
        assert np.array_equal(layer.codes().numpy(), trits)
    assert total > 50


def test_bop_keeps_a_second_moment_only_if_it_normalises() -> None:
    for normalise, expected in ((False, {"momentum"}), (True, {"momentum", "square"})):
        layer, (gradient,) = with_gradient("ternary", 1)
        options = {
            "lr": 1.0,
            "gamma": 0.1,
            "tau": 0.1,
            "normalise": normalise,
            "sigma": 0.1,
            "eps": 1e-10,
        }
        optimizer = Bop({"layer": layer}, options)
        layer.gradient = gradient
        optimizer.step()
        assert set(optimizer.state[layer.weight]) == expected


# --- steps


def test_non_finite_gradient_drops_the_step() -> None:
    layer, (gradient,) = with_gradient("ternary", 1)
    optimizer = DQT(
        {"layer": layer}, {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}
    )
    before = copy.deepcopy(layer.state_dict())
    gradient[0, 0] = float("nan")
    layer.gradient = gradient
    outcome = optimizer.step()
    assert (outcome.stepped, outcome.skipped) == (False, True)
    assert layer.gradient is None
    assert not optimizer.state
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())


def test_pending_gradient_is_in_the_state() -> None:
    layer, (first, second) = with_gradient("int8", 2)
    settings = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}
    optimizer = DQT({"layer": layer}, settings)
    layer.gradient = first.clone()
    twin = copy.deepcopy(layer)
    twin.gradient = None
    other = DQT({"layer": twin}, settings)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for module, stepper in ((layer, optimizer), (twin, other)):
        module.add_gradient(second)
        stepper.step()
    assert torch.equal(layer.codes(), twin.codes())
    optimizer.zero_grad()
    assert optimizer.state_dict()["gradients"] == {}


# --- in a run


def write(path: Path, optimizer: dict[str, Any], levels: str = "ternary", **phase: Any) -> Path:
    (path / "text.txt").write_text("to be or not to be, that is the question. " * 40)
    sizes = {"batch_size": 4, "block_size": 16, "eval_every": 1000}
    standard = {"name": "standard", **sizes, **phase}
    lines = [
        "name: direct",
        f"data: {{name: text, path: {path / 'text.txt'}, tokenizer: characters}}",
        f"model: {{name: direct, width: 32, layers: 1, heads: 2, max_length: 16, levels: "
        f"{levels}}}",
        f"optimizer: {optimizer}".replace("'", ""),
        "checkpoint: {every: 4, keep: 9}",
        f"phases: [{standard}]".replace("'", ""),
    ]
    config = path / "config.yaml"
    config.write_text("\n".join(lines))
    return config


def split(**ternary: Any) -> dict[str, Any]:
    return {"name": "split", "ternary": ternary, "float": {"name": "adamw", "lr": 0.004}}


@pytest.mark.parametrize(
    ("levels", "rule"),
    [
        ("ternary", {"name": "dqt", "lr": 0.002}),
        ("int8", {"name": "dqt", "lr": 0.002}),
        ("ternary", {"name": "bop", "gamma": 0.05, "tau": 0.1, "normalise": "true", "sigma": 0.05}),
    ],
)
def test_training_lowers_the_loss(tmp_path: Path, levels: str, rule: dict[str, Any]) -> None:
    config = write(tmp_path, split(**rule), levels, steps=60)
    report = train(load_config(config).config, RunRequest(directory=tmp_path / "run"))
    losses = [
        line
        for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
        if '"train"' in line
    ]
    assert len(losses) == 60
    # The text has 16 characters: log 16 = 2.77 nats is chance.
    assert report.validation_loss < 1.5
    assert any('"flips": 0' not in line for line in losses)


@pytest.mark.parametrize("rule", [{"name": "dqt"}, {"name": "bop", "gamma": 0.1, "tau": 0.0001}])
def test_resume_is_bitwise(tmp_path: Path, rule: dict[str, Any]) -> None:
    config = load_config(
        write(tmp_path, split(**rule), steps=8, gradient_accumulation_steps=2)
    ).config
    train(config, RunRequest(directory=tmp_path / "whole"))
    checkpoints = sorted((tmp_path / "whole" / "checkpoints").glob("step-*"))
    assert len(checkpoints) == 2
    before = {file.name: file.read_bytes() for file in checkpoints[1].iterdir()}
    for file in checkpoints[1].iterdir():
        file.unlink()
    checkpoints[1].rmdir()
    train(config, RunRequest(directory=None, resume=str(checkpoints[0])))
    for name in ("model.safetensors", "state.safetensors", "state.json"):
        assert (checkpoints[1] / name).read_bytes() == before[name], name


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["optimizer={name: adamw}"],
            "cannot train modules with integer weights of their own format",
        ),
        (["optimizer={name: dqt}"], "optimizer: 'dqt' cannot train float parameters"),
        (
            ["optimizer.ternary={name: sign_votes}"],
            "optimizer.ternary: 'sign_votes' cannot train modules with integer",
        ),
        (["optimizer.ternary={name: bop}", "model.levels=int8"], "bop flips ternary weights"),
        (
            ["model={name: decoder, width: 32, heads: 2, layers: 1}"],
            "optimizer.ternary: 'dqt' cannot train ternary",
        ),
    ],
)
def test_untrained_weights_are_refused(tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, split(name="dqt"), steps=1), overrides)
    assert message in str(caught.value)
