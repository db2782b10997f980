"""The study ``trainer``: its methods against closed forms, and the study with a tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import asdict

from arb_ternary.errors import EnvironmentProblem
from arb_ternary_bench.studies import trainer
from arb_ternary_bench.studies.trainer import TABLE, TrainerOptions
from arb_ternary_bench.study import Session
from arb_ternary_bench.training.in_trainer import StraightThroughLinear, TrainerRun, respond

OPTIONS = TrainerOptions(
    seeds=2,
    steps=2,
    batch=2,
    length=16,
    width=64,
    layers=1,
    windows=2,
    adamw_rates=(0.002,),
    qat_rates=(0.004,),
    votes_rates=(0.1, 0.2),
    speed_steps=1,
)


def test_straight_through_linear_rounds_as_bitnet_does() -> None:
    layer = StraightThroughLinear(6, 4, bias=False)
    x = torch.randn(3, 6, requires_grad=True)
    y = layer(x)
    y.sum().backward()

    weight = layer.weight.detach().double().numpy()
    mean = np.abs(weight).mean()
    rounded_weight = np.clip(np.rint(weight / mean), -1, 1) * mean
    inputs = x.detach().double().numpy()
    step = np.abs(inputs).max(axis=1, keepdims=True) / 127
    rounded_inputs = np.rint(inputs / step) * step
    assert np.allclose(y.detach().numpy(), rounded_inputs @ rounded_weight.T, atol=1e-5)
    # Straight through: gradients are those of a linear with the rounded factors.
    assert np.allclose(x.grad.numpy(), rounded_weight.sum(axis=0), atol=1e-5)
    assert np.allclose(layer.weight.grad.numpy(), rounded_inputs.sum(axis=0), atol=1e-5)


@pytest.mark.parametrize("method", ["adamw", "qat", "votes"])
def test_a_method_learns(method: Any) -> None:
    pytest.importorskip("accelerate")
    pytest.importorskip("arb_ternary_trainers")
    rate = {"adamw": 0.01, "qat": 0.02, "votes": 0.4}[method]
    run = TrainerRun(
        method=method,
        rate=rate,
        float_rate=0.01,
        seed=0,
        steps=20,
        batch=8,
        length=32,
        width=64,
        layers=1,
        windows=32,
        threads=1,
    )
    found = respond({name: getattr(run, name) for name in TrainerRun.__annotations__})
    # The text has 84 characters: log(84) = 4.43 without learning. 3.32 is the entropy of single
    # characters, so a model far below 4 has learned more than the shape of its head.
    assert found["loss"] < 3.6
    # 64 x 64 of queries, keys, values and outputs; 64 x 128 of gate, up and down.
    assert found["weights"] == 4 * 64 * 64 + 3 * 64 * 128
    masters = 4 * found["weights"]
    if method == "votes":
        assert found["model_bytes"] - 4 * 2 * 84 * 64 < 1.5 * found["weights"] + 20_000
    else:
        assert found["model_bytes"] > masters
        assert found["optimizer_bytes"] > 2 * masters


def test_a_rate_is_chosen_by_loss_and_finished_runs_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[TrainerRun] = []

    def measure(run: TrainerRun) -> dict[str, Any]:
        started.append(run)
        figures = dict.fromkeys(("tokens_per_second", "memory_bytes", "weights"), 1)
        sizes = {"model_bytes": 4, "optimizer_bytes": 8}
        return {**figures, **sizes, "loss": abs(run.rate - 0.2) + run.seed}

    monkeypatch.setattr(trainer, "measure", measure)
    monkeypatch.setattr(trainer, "version", lambda _: "0.0")
    result = trainer.run(OPTIONS, Session(tmp_path))
    votes = result["methods"][-1]
    assert votes["rate"] == 0.2
    assert votes["losses"] == [0.0, 1.0]
    assert votes["trials"] == {"0.1": pytest.approx(0.1), "0.2": 0.0}
    trained = [run for run in started if run.steps == 2]
    assert len(trained) == 2 + 2 + 2 + 3
    assert len(started) - len(trained) == 3 * 4

    started.clear()
    again = trainer.run(OPTIONS, Session(tmp_path))
    assert not [run for run in started if run.steps == 2]
    assert again["methods"] == result["methods"]
    shown = TABLE.markdown({"options": asdict(OPTIONS), **result})
    assert "| votes, `arb_ternary.ternarize` | 0.500 ± 0.707 | 0.2 | 1 |" in shown


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "_PACKAGES", ("arb-ternary-core", "no-such-package"))
    with pytest.raises(EnvironmentProblem, match="no-such-package") as caught:
        trainer.run(OPTIONS, Session(tmp_path))
    assert "pip install arb-ternary-core no-such-package" in caught.value.hint
