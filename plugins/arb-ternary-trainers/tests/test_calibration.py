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


def test_gptq_fits_the_first_linear_as_upcycle_does() -> None:
    model = Two()
    x = inputs(512, 64)
    weight = model.layers[0].weight.detach().clone()
    report = arb_ternary.ternarize(
        model, init="gptq", calibration=list(x.split(128)), group_size=32
    )
    assert {each.init for each in report.replaced} == {"gptq_cd"}
    gram = torch.tensor(numbers(x).T @ numbers(x))
    expected = project(
        corrected(weight, gram, gram, ProjectionConfig().damping).float(),
        ProjectionConfig(),
        32,
        gram,
    )
    got = model.layers[0].ternary
    assert (got.trits() == expected.trits).double().mean() > 0.999
    assert (got.logical_votes() == expected.votes(8)).double().mean() > 0.99
    fitted = output_error(numbers(weight), numbers(got.dense_weight()), numbers(x))
    plain = Two()
    arb_ternary.ternarize(plain, group_size=32)
    rounded = numbers(plain.layers[0].ternary.dense_weight())
    assert fitted < 0.8 * output_error(numbers(weight), rounded, numbers(x))


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
    monkeypatch.delitem(sys.modules, "arb_ternary_trainers.calibration")
    monkeypatch.setitem(sys.modules, "arb_ternary_upcycle.projection.solve", None)
    with pytest.raises(EnvironmentProblem) as caught:
        arb_ternary.ternarize(Two(), init="gptq", calibration=[inputs(16, 64)])
    assert "init: gptq needs a package that is not installed" in caught.value.what
    assert caught.value.hint == install_command("arb-ternary-upcycle")
