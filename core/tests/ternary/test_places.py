"""Weights have the layout of torch on a device that the chosen backend does not serve."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from arb_ternary import TernaryEmbedding, TernaryLinear
from arb_ternary.backends import reference
from arb_ternary.backends.protocol import ProbeResult
from arb_ternary.errors import EnvironmentProblem
from arb_ternary.ternary import module as modules


class _Elsewhere:
    """The torch backend with its bytes the other way round, on a device that is reached when the
    test says so.
    """

    name = "elsewhere"
    capabilities = frozenset({"narrow_votes"})

    def __init__(self) -> None:
        self.reached = False
        kernels: Any = reference.build().kernels
        turned = {
            "pack": lambda trits: 255 - kernels["pack"](trits),
            "unpack": lambda packed, shape: kernels["unpack"](255 - packed, shape),
        }
        self.kernels = {**kernels, **turned}


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> _Elsewhere:
    backend = _Elsewhere()
    torch_backend = reference.build()

    def named(name: str) -> object:
        return backend if name == backend.name else torch_backend

    monkeypatch.setattr(modules, "get_backend", named)
    monkeypatch.setattr("arb_ternary.backends.dispatch.get_backend", named)
    monkeypatch.setattr(
        modules, "serves", lambda name, device: name != backend.name or backend.reached
    )
    return backend


def _state(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("vote_bits", [8, 2])
def test_a_module_is_repacked_where_its_backend_serves(
    vote_bits: int, elsewhere: _Elsewhere
) -> None:
    torch.manual_seed(0)
    module = TernaryLinear(40, 24, group_size=32, vote_bits=vote_bits, backend="elsewhere")
    assert module.backend == "torch"
    born = _state(module)
    weight = module.weight.clone()
    elsewhere.reached = True
    module.to("cpu")
    assert module.backend == "elsewhere"
    assert torch.equal(module.weight, 255 - weight)
    elsewhere.reached = False
    module.to("cpu")
    assert module.backend == "torch"
    assert torch.equal(module.weight, weight)
    for name, value in _state(module).items():
        assert torch.equal(value, born[name]), name


def test_a_backend_that_does_not_serve_computes_nothing(elsewhere: _Elsewhere) -> None:
    linear = TernaryLinear(40, 24, backend="elsewhere")
    table = TernaryEmbedding(5, 40, backend="elsewhere")
    for module, given in ((linear, torch.zeros(1, 40)), (table, torch.zeros(1, dtype=torch.int64))):
        with pytest.raises(EnvironmentProblem, match="backend 'elsewhere' cannot compute on cpu"):
            module(given)
    linear.set_backend("torch")
    assert linear(torch.zeros(1, 40)).shape == (1, 24)


def test_a_move_to_another_device_uses_the_layout_of_torch(
    elsewhere: _Elsewhere, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere.reached = True
    module = TernaryLinear(40, 24, backend="elsewhere")
    seen: list[str] = []
    monkeypatch.setattr(modules, "_META", "none")
    moved: Any = torch.nn.Module._apply

    def watched(self: torch.nn.Module, fn: object, recurse: bool = True) -> Any:
        seen.append(module.backend)
        monkeypatch.setattr(modules, "_layout_backend", lambda name, device: "torch")
        return moved(self, fn, recurse)

    monkeypatch.setattr(torch.nn.Module, "_apply", watched)
    module.to("meta")
    assert seen == ["torch"]


def test_a_backend_is_asked_once_whether_it_serves_a_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from arb_ternary.backends import select

    select.reset_backends()
    asked: list[str] = []
    probe = select._probe_named

    def counted(name: str, device: str) -> ProbeResult:
        asked.append(name)
        return probe(name, device)

    monkeypatch.setattr(select, "_probe_named", counted)
    assert [select.serves("torch", "cpu"), select.serves("torch", "cpu")] == [True, True]
    assert asked == ["torch"]
    select.reset_backends()
