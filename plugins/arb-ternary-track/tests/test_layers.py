"""Measurements of layers, beside the metrics file and the checkpoints of the same run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from arb_ternary import TernaryLinear
from arb_ternary_track.layers import LayerMeter, count_values
from arb_ternary_track.points import Histogram
from arb_ternary_train.checkpoint import read_checkpoint
from arb_ternary_train.metrics import read_metrics


def repeated(histogram: Histogram) -> list[int]:
    """The integers that a histogram counts, in order."""
    return np.repeat(histogram.values, histogram.counts).tolist()


def test_flips_of_layers_add_up_to_those_of_the_step(tiny: Any, track: Any, recorder: Any) -> None:
    writer = recorder()
    track(writer, layers_every=1, wait=60)
    run, _ = tiny.run("run", "phases.0.steps=12")
    expected = [r["flips"] for r in read_metrics(run.metrics_file) if r["event"] == "train"]
    layers = [point.scalars for point in writer.points if point.kind == "layers"]
    found = [sum(v for k, v in each.items() if k.startswith("flips/")) for each in layers]
    assert found == expected
    assert sum(expected) > 0
    assert all(len([k for k in each if k.startswith("flips/")]) == 7 for each in layers)


def test_histograms_are_those_of_the_checkpoint(tiny: Any, track: Any, recorder: Any) -> None:
    writer = recorder()
    track(writer, layers_every=3, wait=60)
    run, _ = tiny.run("run")
    for point in (point for point in writer.points if point.kind == "layers"):
        model = read_checkpoint(run.checkpoints / f"step-{point.step:08d}").model
        names = [name.removesuffix(".votes") for name in model if name.endswith(".votes")]
        assert len(names) > 3
        for name in names:
            votes = model[f"{name}.votes"].flatten().tolist()
            assert repeated(point.histograms[f"accumulators/{name}"]) == sorted(votes)
            exponents = model[f"{name}.exponent"].flatten().tolist()
            assert repeated(point.histograms[f"exponents/{name}"]) == sorted(exponents)
            assert point.scalars[f"saturated/{name}"] == 0


def context_of(model: nn.Module, *, behind: bool = False) -> Any:
    return SimpleNamespace(model=model, reporting_behind=behind)


def linear() -> TernaryLinear:
    return TernaryLinear(32, 4, bias=False, group_size=32)


def test_saturation_is_the_share_at_both_ends() -> None:
    model = nn.ModuleDict({"a": linear(), "b": linear()})
    votes = torch.zeros(4, 32, dtype=torch.int8)
    votes[0, 0], votes[1, 1], votes[2, 2], votes[3, 3] = 127, -127, -128, 126
    model["a"].set_votes(votes)
    scalars, histograms = LayerMeter(5).measure(context_of(model), 10) or ({}, {})
    assert scalars == {"saturated/a": 3 / 128, "saturated/b": 0}
    assert repeated(histograms["accumulators/a"]) == [-128, -127, *[0] * 124, 126, 127]
    assert LayerMeter(5).measure(context_of(model), 11) is None
    assert LayerMeter(0).measure(context_of(model), 0) is None


def test_layers_wait_for_the_model_of_the_step() -> None:
    model = nn.ModuleDict({"a": linear()})
    meter = LayerMeter(2)
    meter.prepare(context_of(model), 1)
    assert meter.measure(context_of(model, behind=True), 2) is None
    meter.prepare(context_of(model, behind=True), 2)
    scalars, _ = meter.measure(context_of(model), 3) or ({}, {})
    assert scalars == {"saturated/a": 0}


def test_frozen_layers_are_left_out() -> None:
    model = nn.ModuleDict({"a": linear()})
    model["a"].frozen = True
    assert LayerMeter(1).measure(context_of(model), 1) == ({}, {})


def test_more_values_than_one_chunk_are_counted(monkeypatch: Any) -> None:
    monkeypatch.setattr("arb_ternary_track.layers._CHUNK", 7)
    values = torch.tensor([*range(-128, 128), 5, 5, -3], dtype=torch.int8)
    expected = np.bincount(values.numpy().astype(int) + 128, minlength=256)
    assert count_values(values).tolist() == expected.tolist()
