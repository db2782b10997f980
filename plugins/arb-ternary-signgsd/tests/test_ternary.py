"""Test SignGSD on ternary modules, and on models with ternary modules and float parameters."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from arb_ternary import TernaryLinear
from arb_ternary.errors import ConfigError
from arb_ternary.optim.protocol import Trainable, collect_trainable
from arb_ternary_signgsd import NanGradientError, SignGSD
from arb_ternary_signgsd.config import SignGSDConfig
from arb_ternary_signgsd.optimizer import JoinedSignGSD, build
from arb_ternary_signgsd.sign_gsd import NanPolicy
from arb_ternary_signgsd.ternary import TernarySignGSD, decay_votes
from arb_ternary_train.audit import audit
from arb_ternary_train.optim.joined import JoinedOptimizer
from arb_ternary_train.update import ternary_update
from arb_ternary_votes.config import SignVotesConfig
from arb_ternary_votes.sign_votes import SignVotes


class Mixed(nn.Module):
    """A ternary layer between float ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 40, bias=False)
        self.middle = TernaryLinear(40, 8, group_size=32, activations="float")
        self.last = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.first(x)))


def backward(model: nn.Module, seed: int = 0, columns: int = 6) -> None:
    x = torch.randn(5, columns, generator=torch.Generator().manual_seed(seed))
    (model(x) ** 2).mean().backward()


@given(weight_decay=st.floats(0, 5), updates=st.integers(1, 300))
def test_n_updates_cast_the_whole_part_of_n_times_the_decay(
    weight_decay: float, updates: int
) -> None:
    cast = sum(decay_votes(update, weight_decay) for update in range(updates))
    share = round(weight_decay * 2**20) / 2**20
    assert cast == int(np.floor(updates * share))


def test_without_decay_and_nan_it_equals_sign_votes() -> None:
    from arb_ternary_votes.sign_votes import SignVotes

    states = []
    for make in (
        SignVotes,
        lambda modules, **options: TernarySignGSD(modules, votes=SignVotesConfig(**options)),
    ):
        torch.manual_seed(1)
        layer = TernaryLinear(32, 4, group_size=32)
        optimizer = make({"layer": layer}, accum_threshold=3, e_accum_threshold=4)
        for step in range(12):
            optimizer.zero_grad()
            backward(layer, step, 32)
            optimizer.step()
        states.append(layer.state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.parametrize(("weight_decay", "updates"), [(1.0, 5), (0.25, 9), (2.5, 4)])
def test_decay_votes_pull_every_trit_towards_zero(weight_decay: float, updates: int) -> None:
    layer = TernaryLinear(32, 4, group_size=32)
    trits = torch.randint(-1, 2, (4, 32), dtype=torch.int8)
    layer.set_trits(trits)
    optimizer = TernarySignGSD(
        {"layer": layer}, weight_decay=weight_decay, votes=SignVotesConfig(accum_threshold=127)
    )
    for _ in range(updates):
        optimizer.step()
    # No gradient was ever seen: the accumulators hold the decay alone.
    assert torch.equal(layer.logical_votes().int(), -int(weight_decay * updates) * trits.int())
    assert torch.equal(layer.trits(), trits)


def test_decay_alone_leaves_every_trit_at_zero() -> None:
    layer = TernaryLinear(32, 4, group_size=32)
    optimizer = TernarySignGSD(
        {"layer": layer}, weight_decay=1.0, votes=SignVotesConfig(accum_threshold=3)
    )
    flips = [optimizer.step().flips for _ in range(6)]
    assert int(layer.trits().abs().sum()) == 0
    assert flips[:2] == [0, 0]
    assert flips[3:] == [0, 0, 0]


def test_the_decay_votes_saturate() -> None:
    layer = TernaryLinear(32, 2, group_size=32)
    layer.set_trits(
        torch.tensor([[1] * 32, [-1] * 32], dtype=torch.int8),
        votes=torch.tensor([[-100] * 32, [100] * 32], dtype=torch.int8),
    )
    optimizer = TernarySignGSD({"layer": layer}, weight_decay=127.0)
    optimizer.param_groups[0]["lr"] = 0.0  # Votes are kept and nothing flips.
    optimizer.step()
    assert layer.logical_votes()[:, 0].tolist() == [-128, 127]


def test_the_decay_votes_saturate_where_narrow_accumulators_end() -> None:
    layer = TernaryLinear(33, 2, group_size=32, vote_bits=4)
    layer.set_trits(torch.ones(2, 33, dtype=torch.int8))
    optimizer = TernarySignGSD({"layer": layer}, weight_decay=9.0)
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert bool((layer.logical_votes() == -7).all())


def test_decay_larger_than_an_accumulator_is_an_error() -> None:
    with pytest.raises(
        ConfigError,
        match="weight_decay must be between 0 and 127 votes per update for ternary modules",
    ):
        TernarySignGSD({"layer": TernaryLinear(32, 2, group_size=32)}, weight_decay=128.0)


def test_mixed_model_gets_one_optimizer_with_joined_groups() -> None:
    optimizer = build(SignGSDConfig(lr=0.25), collect_trainable(Mixed()))
    assert isinstance(optimizer, JoinedSignGSD)
    assert [
        (group["kind"], group["lr"], len(group["params"])) for group in optimizer.param_groups
    ] == [
        ("float", 0.25, 3),
        ("ternary", 1.0, 1),
    ]
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.5]


def test_both_parts_of_a_model_learn() -> None:
    torch.manual_seed(0)
    model = Mixed()
    optimizer = build(
        SignGSDConfig(lr=0.125, votes=SignVotesConfig(accum_threshold=1)), collect_trainable(model)
    )
    weight = model.first.weight.detach().clone()
    trits = model.middle.trits()
    backward(model)
    gradient = model.first.weight.grad.clone()
    outcome = optimizer.step()
    assert torch.equal(model.first.weight, weight - 0.125 * gradient.sign())
    assert outcome.flips == int((model.middle.trits() != trits).sum()) > 0
    assert outcome.stepped


def test_parts_that_are_absent_give_the_plain_optimizers() -> None:
    assert type(build(SignGSDConfig(), collect_trainable(nn.Linear(2, 2)))) is SignGSD
    pure = TernaryLinear(32, 2, group_size=32)
    optimizer = build(SignGSDConfig(), collect_trainable(pure))
    assert type(optimizer) is TernarySignGSD
    assert audit(pure, optimizer).pure
    with pytest.raises(ConfigError, match="nothing to train"):
        build(SignGSDConfig(), Trainable())


def test_maximising_ternary_modules_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.maximize") as caught:
        build(SignGSDConfig(maximize=True), collect_trainable(Mixed()))
    assert caught.value.hint == "negate the loss instead"


def snapshot(model: nn.Module) -> dict[str, torch.Tensor]:
    votes = ("votes", "exponent_votes", "control")
    return {
        name: value.clone()
        for name, value in model.state_dict().items()
        if not name.endswith(votes)
    }


def assert_same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("where", ["float", "ternary"])
def test_a_nan_in_either_part_stops_both_before_anything_changes(where: str) -> None:
    model = Mixed()
    optimizer = build(
        SignGSDConfig(votes=SignVotesConfig(accum_threshold=1)), collect_trainable(model)
    )
    backward(model)
    if where == "float":
        model.last.bias.grad.fill_(float("nan"))
    else:
        optimizer.zero_grad()
        x = torch.randn(3, 40, requires_grad=True)
        model.middle(x).backward(torch.full((3, 8), float("nan")))
        model.first.weight.grad = torch.ones_like(model.first.weight)
    before = snapshot(model)
    named = (
        "'last.bias'" if where == "float" else r"ternary module 'middle', shape \(8, 40\): 320 NaN"
    )
    with pytest.raises(NanGradientError, match=named):
        optimizer.step()
    assert_same(before, snapshot(model))


@pytest.mark.parametrize("where", ["float", "ternary"])
def test_policy_skip_drops_one_step_of_both_parts(where: str) -> None:
    model = Mixed()
    config = SignGSDConfig(nan_policy="skip", votes=SignVotesConfig(accum_threshold=1))
    optimizer = build(config, collect_trainable(model))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    backward(model)
    assert not torch.equal(model.middle.votes, before["middle.votes"])
    if where == "float":
        model.last.bias.grad.fill_(float("nan"))
    else:
        model.middle(torch.randn(3, 40)).backward(torch.full((3, 8), float("nan")))
    outcome = optimizer.step()
    assert (outcome.stepped, outcome.skipped) == (False, True)
    assert_same(before, model.state_dict())
    assert not model.middle.stats.any()
    backward(model, 1)
    assert optimizer.step().stepped
    assert not torch.equal(model.first.weight, before["first.weight"])


@pytest.mark.parametrize("first", ["ternary", "float"])
def test_joined_optimizer_skips_both_parts_in_any_order(
    first: str,
) -> None:
    model = Mixed()
    floats = SignGSD([p for p in model.parameters() if p.requires_grad], nan_policy="skip")
    parts: dict[str, torch.optim.Optimizer] = {
        "ternary": SignVotes({"middle": model.middle}, accum_threshold=1),
        "float": floats,
    }
    optimizer = JoinedOptimizer(parts if first == "ternary" else dict(reversed(parts.items())))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    backward(model)
    model.last.bias.grad.fill_(float("nan"))
    outcome = optimizer.step()
    assert (outcome.stepped, outcome.skipped) == (False, True)
    assert_same(before, model.state_dict())
    assert model.first.weight.grad is None


def test_policy_zero_lets_nan_cast_no_vote() -> None:
    layer = TernaryLinear(32, 2, group_size=32)
    optimizer = build(SignGSDConfig(nan_policy="zero"), collect_trainable(layer))
    layer(torch.ones(1, 32)).backward(torch.tensor([[float("nan"), 1.0]]))
    assert optimizer.step().stepped
    assert layer.logical_votes().sum(dim=1).tolist() == [0, -32]


def test_memory_counts_parameters_and_packed_weights() -> None:
    model = nn.ModuleDict(
        {"dense": nn.Linear(1024, 256, bias=False), "packed": TernaryLinear(4096, 1024)}
    )
    optimizer = build(SignGSDConfig(), collect_trainable(model))
    assert optimizer.get_memory_mb() == 1.0 + 1.0


def test_a_restored_optimizer_continues_bit_for_bit() -> None:
    torch.manual_seed(0)
    config = SignGSDConfig(lr=0.01, weight_decay=0.3, votes=SignVotesConfig(accum_threshold=4))
    model = Mixed()
    twin = Mixed()
    optimizer = build(config, collect_trainable(model))
    other = build(config, collect_trainable(twin))

    def advance(net: nn.Module, stepper: torch.optim.Optimizer, start: int, stop: int) -> None:
        for step in range(start, stop):
            stepper.zero_grad()
            backward(net, step)
            stepper.step()

    advance(model, optimizer, 0, 7)
    twin.load_state_dict(model.state_dict())
    other.load_state_dict(optimizer.state_dict())
    advance(model, optimizer, 7, 15)
    advance(twin, other, 7, 15)
    for name, value in model.state_dict().items():
        assert torch.equal(value, twin.state_dict()[name]), name


class Reads(TorchDispatchMode):
    """Count the numbers read out of tensors one by one; the host waits for a device for each."""

    found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("nan_policy", ["error", "skip"])
def test_a_step_reads_no_number_out_of_a_tensor_of_one_module(nan_policy: NanPolicy) -> None:
    model = nn.Sequential(
        *(TernaryLinear(32, 32, group_size=32, activations="float") for _ in range(3))
    )
    modules = {
        str(i): module for i, module in enumerate(model) if isinstance(module, TernaryLinear)
    }
    optimizer = TernarySignGSD(modules, weight_decay=0.5, nan_policy=nan_policy)
    x = torch.randn(4, 32)
    with Reads() as reads:
        for _ in range(2):
            assert ternary_update(model, optimizer, model(x).square().sum()).stepped
    assert reads.found == 0
