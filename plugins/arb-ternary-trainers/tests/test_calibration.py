from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace as Kit
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import arb_ternary
from arb_ternary.errors import EnvironmentProblem, UsageProblem
from arb_ternary.plugins.discovery import install_command
from arb_ternary_upcycle.projection.config import ProjectionConfig
from arb_ternary_upcycle.projection.correction import corrected
from arb_ternary_upcycle.projection.solve import project


def inputs(rows: int, columns: int, seed: int = 0) -> Tensor:
    """Inputs whose columns are correlated and of different size, as those of a model are."""
    rng = np.random.default_rng(seed)
    mixing = rng.normal(size=(columns, columns)) * np.exp2(rng.integers(-3, 3, columns))
    return torch.tensor(rng.normal(size=(rows, columns)) @ mixing, dtype=torch.float32)


def output_error(weight: np.ndarray, other: np.ndarray, x: np.ndarray) -> float:
    return float(np.linalg.norm(x @ (weight - other).T) / np.linalg.norm(x @ weight.T))


def numbers(tensor: Tensor) -> np.ndarray:
    return tensor.detach().double().numpy()


class Two(nn.Module):
    """Two blocks of one linear each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 32)])
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.layers[1](self.drop(torch.relu(scale * self.layers[0](x))))


def int8(x: np.ndarray) -> np.ndarray:
    """Rows rounded to int8 by their largest element."""
    scale = np.abs(x).max(axis=1, keepdims=True).astype(np.float32) / np.float32(127)
    return np.rint(x.astype(np.float32) / scale) * scale.astype(np.float64)


@pytest.mark.parametrize("activations", ["int8", "float"])
def test_gptq_fits_linears_to_the_inputs_that_they_will_read(activations: str) -> None:
    model = Two()
    x = inputs(512, 64)
    x[:, 5] *= 300  # the others lose most of their bits to int8
    arb_ternary.ternarize(
        model,
        init="gptq",
        calibration=list(x.split(128)),
        group_size=32,
        activations=activations,
    )
    first, second = Two().layers
    read = int8 if activations == "int8" else np.asarray

    teacher = numbers(x)
    student = read(numbers(x))
    for layer, made in ((first, model.layers[0]), (second, model.layers[1])):
        gram = torch.tensor(student.T @ student)
        cross = torch.tensor(teacher.T @ student)
        options = ProjectionConfig()
        weight = corrected(layer.weight.detach(), gram, cross, options.damping).float()
        expected = project(weight, options, 32, gram)
        got = made.ternary
        assert (got.trits() == expected.trits).double().mean() > 0.995
        assert (got.logical_votes() == expected.votes(8)).double().mean() > 0.99
        # What the next layer reads.
        teacher = np.maximum(teacher @ numbers(layer.weight).T + numbers(layer.bias), 0)
        student = student @ numbers(got.dense_weight()).T + numbers(layer.bias)
        student = read(np.maximum(student, 0))


def test_gptq_fits_better_than_absmean() -> None:
    x = inputs(512, 64)
    weight = numbers(Two().layers[0].weight)
    errors = {}
    for name, given in (("gptq", [x]), ("absmean", None)):
        model = Two()
        report = arb_ternary.ternarize(model, init=name, calibration=given, group_size=32)
        rounded = numbers(model.layers[0].ternary.dense_weight())
        errors[name] = output_error(weight, rounded, numbers(x))
        assert {each.init for each in report.replaced} == {"gptq_cd" if given else "absmean"}
    assert errors["gptq"] < 0.8 * errors["absmean"]


def test_later_linears_compensate_for_the_errors_of_earlier_ones() -> None:
    x = inputs(512, 64)
    float_model = Two().eval()
    expected = float_model(x)
    errors = {}
    for name in ("gptq", "absmean", "separately"):
        model = Two().eval()
        given = [x] if name != "absmean" else None
        if name == "separately":
            # Each linear is fitted to the inputs of the float model.
            hidden = [torch.relu(float_model.layers[0](x)).detach()]
            for index, batches in ((0, [x]), (1, hidden)):
                layer = nn.Sequential(model.layers[index])
                arb_ternary.ternarize(layer, init="gptq", calibration=batches, activations="float")
        else:
            arb_ternary.ternarize(model, init=name, calibration=given, activations="float")
        errors[name] = ((model(x) - expected).norm() / expected.norm()).item()
    assert errors["gptq"] < errors["separately"] < errors["absmean"]


@pytest.mark.parametrize("form", ["tensor", "tuple", "dict"])
def test_a_batch_is_a_tensor_a_tuple_or_a_dict(form: str) -> None:
    x = inputs(128, 64)
    batch = {"tensor": x, "tuple": (x, 1.0), "dict": {"x": x, "scale": 1.0}}[form]
    model = Two().train()
    arb_ternary.ternarize(model, init="gptq", calibration=[batch])
    other = Two()
    arb_ternary.ternarize(other, init="gptq", calibration=[x])
    for one, two in zip(model.layers, other.layers, strict=True):
        assert torch.equal(one.ternary.trits(), two.ternary.trits())
    assert all(module.training for module in model.modules())


def test_gptq_rounds_what_has_no_inputs_with_the_least_squared_error(kit: Kit) -> None:
    model = kit.new_net()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    tokens = kit.Bigram().batch(0)
    report = arb_ternary.ternarize(model, init="gptq", calibration=[tokens, tokens + 0])
    assert {each.name: each.init for each in report.replaced} == {
        "embed": "ls",
        "mix": "ls",
        "up": "gptq_cd",
        "down": "gptq_cd",
    }
    plain = kit.new_net()
    arb_ternary.ternarize(plain)
    for name in ("embed", "mix"):
        weight = before[f"{name}.weight"]
        error = (model.get_submodule(name).weight - weight).norm()
        assert error <= (plain.get_submodule(name).weight - weight).norm()


def once() -> Iterator[Tensor]:
    yield inputs(16, 64)


@pytest.mark.parametrize(
    ("calibration", "words"),
    [
        (once(), "calibration: it is an iterator, which can be read only once"),
        ([], "calibration: it has no batches"),
        (["text"], "a batch is a tensor, a tuple of arguments or a dict of keyword arguments, not"),
    ],
)
def test_a_calibration_that_cannot_be_used_changes_nothing(calibration: Any, words: str) -> None:
    model = Two()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with pytest.raises(UsageProblem, match=words):
        arb_ternary.ternarize(model, init="gptq", calibration=calibration)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_failure_within_calibration_leaves_the_float_model() -> None:
    model = Two()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with pytest.raises(RuntimeError, match="must match the size"):
        arb_ternary.ternarize(model, init="gptq", calibration=[inputs(16, 64), torch.zeros(3, 5)])
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])
    assert type(model.layers[0]) is nn.Linear
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_without_its_package_gptq_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "arb_ternary_trainers.calibration", raising=False)
    monkeypatch.setitem(sys.modules, "arb_ternary_upcycle.projection.solve", None)
    with pytest.raises(EnvironmentProblem) as caught:
        arb_ternary.ternarize(Two(), init="gptq", calibration=[inputs(16, 64)])
    assert "init: gptq needs a package that is not installed" in caught.value.what
    assert caught.value.hint == install_command("arb-ternary-upcycle")
