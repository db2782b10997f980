"""State that a new optimizer takes over from the old one."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from arb_ternary.optim.protocol import build_optimizer, collect_trainable, inner_optimizers
from arb_ternary.ternary.linear import TernaryLinear
from arb_ternary_orchestrator.optim.adagc import AdaGC
from arb_ternary_orchestrator.strategies.carry import carry_state
from arb_ternary_testing.component import make_choice
from arb_ternary_train.optim.joined import JoinedOptimizer
from arb_ternary_train.schedules import apply_schedule
from arb_ternary_votes.scaled_votes import ScaledVotes


def model() -> nn.Module:
    torch.manual_seed(0)
    votes = TernaryLinear(32, 32, group_size=32, activations="float", scale_rule="frozen")
    return nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), votes)


def built(network: nn.Module, name: str, **options: Any) -> Optimizer:
    return build_optimizer(
        "optimizer", make_choice("optimizer", name, options), collect_trainable(network)
    )


def train(network: nn.Module, optimizer: Any, steps: int, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        apply_schedule(
            optimizer, "linear", step + 3, steps=20, warmup=0, lr=None, min_lr=None, min_rate=0.05
        )
        network(torch.randn(4, 32, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def part(optimizer: Optimizer, kind: type) -> Any:
    return next(each for each in inner_optimizers(optimizer) if type(each) is kind)


def moments(optimizer: Optimizer) -> list[Tensor]:
    adamw = part(optimizer, torch.optim.AdamW)
    parameters = [parameter for group in adamw.param_groups for parameter in group["params"]]
    return [
        adamw.state[each][name].clone()
        for each in parameters
        for name in ("exp_avg", "exp_avg_sq", "step")
    ]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def test_moments_are_carried_and_settings_are_not() -> None:
    network = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32))
    old = built(network, "adamw", lr=0.01)
    train(network, old, 3)
    expected = moments(old)
    kept = deepcopy(old.state_dict())
    new = built(network, "adamw", lr=0.5, beta2=0.999)
    carry_state(old, new)
    assert same(moments(new), expected)
    assert [(group["lr"], group["betas"]) for group in new.param_groups] == [
        (0.5, (0.9, 0.999))
    ] * 2
    assert "initial_lr" not in new.param_groups[0]  # the schedule starts from the new rate
    train(network, new, 1)
    assert same(old.state_dict(), kept)  # nothing is shared
    assert new.param_groups[0]["initial_lr"] == 0.5


def test_another_class_starts_empty() -> None:
    network = nn.Sequential(nn.Linear(32, 32))
    old = built(network, "adamw")
    train(network, old, 2)
    new = built(network, "lion")
    carry_state(old, new)
    assert not new.state
    assert [len(group["params"]) for group in new.param_groups] == [1, 1]


def test_votes_keep_rate_and_magnitudes() -> None:
    network = model()
    old = built(network, "split", ternary={"name": "scaled_votes"})
    train(network, old, 4)
    before: ScaledVotes = part(old, ScaledVotes)
    magnitudes = before.state_dict()["magnitudes"]
    module = next(each for each in network.modules() if isinstance(each, TernaryLinear))
    assert module.vote_scale is not None
    scale = module.vote_scale.clone()
    bits = {name: value.clone() for name, value in network.state_dict().items()}
    new = built(network, "split", ternary={"name": "scaled_votes", "clip": 1.0, "leak": 0.5})
    carry_state(old, new)
    after: ScaledVotes = part(new, ScaledVotes)
    assert same(after.state_dict()["magnitudes"], magnitudes)
    assert (after.updates, after.param_groups[0]["clip"], after.param_groups[0]["leak"]) == (
        4,
        1.0,
        0.5,
    )
    rate = 0.1 * (1 - 0.95 * 6 / 19)  # linear, of step 6 of 20 to a twentieth
    assert after.param_groups[0]["vote_rate"] == pytest.approx(rate)
    assert torch.equal(module.vote_scale, scale)
    assert same(network.state_dict(), bits)


def test_votes_start_anew_without_carrying() -> None:
    network = model()
    train(network, built(network, "split"), 4)
    module = next(each for each in network.modules() if isinstance(each, TernaryLinear))
    built(network, "split")
    assert module.vote_scale is not None
    assert not module.vote_scale.any()


@pytest.mark.parametrize("kind", ["split", "gqc.gnr"])
def test_rebuilt_optimizer_continues_bitwise(kind: str) -> None:
    options: dict[str, Any] = {"float": {"name": "adamw", "lr": 0.01}}
    if kind == "gqc.gnr":
        options = {"target_norm": 2.0, "inner": {"name": "split", **options}}
    ends = []
    for anew in (False, True):
        network = model()
        optimizer = built(network, kind, **options)
        train(network, optimizer, 3)
        if anew:
            old = optimizer
            optimizer = built(network, kind, **options)
            carry_state(old, optimizer)
        train(network, optimizer, 3, seed=2)
        ends.append((network.state_dict(), optimizer.state_dict()))
    assert same(*(end[0] for end in ends))
    assert same(*(end[1] for end in ends))


def test_matching_parts_are_carried() -> None:
    network = model()
    old = built(network, "split", float={"name": "adamw", "lr": 0.01})
    train(network, old, 3)
    new = built(
        network, "split", float={"name": "lion"}, ternary={"name": "scaled_votes", "clip": 1.0}
    )
    carry_state(old, new)
    assert part(new, ScaledVotes).updates == 3
    assert isinstance(new, JoinedOptimizer)
    assert not new.parts["float"].state
    # The groups of a joined optimizer stay those of its parts.
    groups = [group for each in new.parts.values() for group in each.param_groups]
    assert len(groups) == len(new.param_groups)
    assert all(one is other for one, other in zip(groups, new.param_groups, strict=True))


def test_moments_are_carried_into_and_out_of_wrappers() -> None:
    network = model()
    plain: dict[str, Any] = {"name": "split", "float": {"name": "adamw", "lr": 0.01}}
    wrapped = {"inner": plain, "target_norm": 2.0}
    old = built(network, **plain)
    train(network, old, 3)
    expected = moments(old)
    inside = built(network, "gqc.gnr", **wrapped)
    carry_state(old, inside)
    assert same(moments(inside), expected)
    outside = built(network, **plain)
    carry_state(inside, outside)
    assert same(moments(outside), expected)
    assert part(outside, ScaledVotes).updates == 3


def test_swats_keeps_its_phase() -> None:
    network = nn.Sequential(nn.Linear(32, 32))
    old = built(network, "swats", adam_lr=0.01, switch_threshold=1e9, min_steps_before_switch=0)
    train(network, old, 4)
    (before, *_) = old.param_groups
    assert (before["phase"], before["steps"]) == ("sgd", 4)
    new = built(network, "swats", adam_lr=0.02, switch_threshold=1e-9)
    carry_state(old, new)
    (after, *_) = new.param_groups
    assert all(
        after[name] == before[name]
        for name in ("phase", "steps", "projection", "projections", "sgd_rate")
    )
    assert (after["lr"], after["switch_threshold"]) == (0.02, 1e-9)
    assert same([new.state[p] for p in after["params"]], [old.state[p] for p in before["params"]])


def test_averages_of_adagc_are_carried() -> None:
    network = model()
    inner = {"name": "adamw", "lr": 0.01}
    old = built(
        network, "split", float={"name": "adagc", "threshold": 1.5, "warmup": 2, "inner": inner}
    )
    train(network, old, 4)
    new = built(
        network, "split", float={"name": "adagc", "threshold": 3.0, "warmup": 5, "inner": inner}
    )
    carry_state(old, new)
    before = part(old, AdaGC)
    after = part(new, AdaGC)
    assert (after.threshold, after.warmup) == (3.0, 5)
    assert before.state
    assert same(
        [after.state[p] for p in after.parameters], [before.state[p] for p in before.parameters]
    )
    assert same(moments(new), moments(old))
