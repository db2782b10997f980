"""Measurements of a step compared with numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from arb_ternary.ternary.models import ternary_modules
from arb_ternary_orchestrator.telemetry import Meter, Observation


def vector(tensors: Any) -> Any:
    return np.concatenate([tensor.detach().double().numpy().ravel() for tensor in tensors])


def test_measured_norms_changes_and_flips(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before_step = Meter.before_step
    after = Meter.after
    noted: dict[str, Any] = {}
    seen: list[tuple[Observation, dict[str, Any]]] = []

    def before(self: Meter, loop: Any) -> None:
        before_step(self, loop)
        parameters = dict(loop.model.named_parameters())
        squares = {name: float((vector([p.grad]) ** 2).sum()) for name, p in parameters.items()}
        for name, module in ternary_modules(loop.model):
            squares[name] = float(module.gradient_square_sum())
        noted.update(squares=squares, weights=vector(parameters.values()))
        noted["trits"] = {
            name: module.trits().numpy().copy() for name, module in ternary_modules(loop.model)
        }

    def afterwards(self: Meter, loop: Any, drawn: Any) -> Observation | None:
        found = after(self, loop, drawn)
        if found is not None:
            trits = {name: module.trits().numpy() for name, module in ternary_modules(loop.model)}
            flips = {name: int((trits[name] != noted["trits"][name]).sum()) for name in trits}
            moved = vector(loop.model.parameters())
            seen.append((found, {**noted, "flips": flips, "moved": moved}))
        return found

    monkeypatch.setattr(Meter, "before_step", before)
    monkeypatch.setattr(Meter, "after", afterwards)
    options = {"eval_horizon": 4, "telemetry_every": 3}
    run = tiny.run("run", "phases.0.steps=6", policy=options)
    assert [found.step for found, _ in seen] == [1, 2, 3, 4, 5, 6]
    for found, by_hand in seen:
        squares = by_hand["squares"]
        assert found.grad_norm == pytest.approx(np.sqrt(sum(squares.values())), rel=1e-5)
        if found.step % 3:
            assert (found.modules, found.update_ratio, found.flips) == ({}, None, {})
            continue
        parts = {name.split(".")[0] for name in squares}
        for part in parts:
            total = sum(value for name, value in squares.items() if name.split(".")[0] == part)
            assert found.modules[part] == pytest.approx(np.sqrt(total), rel=1e-5)
        change = np.linalg.norm(by_hand["moved"] - by_hand["weights"])
        assert found.update_ratio == pytest.approx(
            change / np.linalg.norm(by_hand["weights"]), rel=1e-3
        )
        assert found.flips == by_hand["flips"]
    assert sum(seen[5][1]["flips"].values()) > 0, "nothing to count"
    losses = [record["loss"] for record in run.metrics if record["event"] == "train"]
    assert [found.loss for found, _ in seen] == losses


def test_large_parameter_is_sampled_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    from arb_ternary_orchestrator import telemetry

    monkeypatch.setattr(telemetry, "_SAMPLED", 4)
    parameter = torch.nn.Parameter(torch.arange(10.0))
    assert telemetry._sample(parameter).tolist() == [0.0, 3.0, 6.0, 9.0]
