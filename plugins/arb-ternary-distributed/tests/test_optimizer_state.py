"""AdamW with sharded moments: the bits of torch's AdamW, and the state dicts of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from arb_ternary.errors import ConfigError
from arb_ternary_distributed.optimizer_state import shard_moments
from arb_ternary_train.world import SingleProcess, World
from arb_test_support.ranks import on_ranks

STEPS = 7
TWO: Any = SingleProcess(size=2)


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(41, 67), (5,), (3, 1024), (), (2048,), (17, 300)]
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def adamw(made: list[nn.Parameter]) -> torch.optim.AdamW:
    groups = [{"params": made[:3], "weight_decay": 0.1}, {"params": made[3:], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), fused=True)


def trained(world: World, first: int, last: int, state: Any) -> Any:
    """Run steps ``first .. last - 1``; parameter 4 has its first gradient in step 2."""
    made = parameters()
    optimizer = adamw(made)
    if world.size > 1:
        shard_moments(optimizer, world)
    if state is not None:
        optimizer.load_state_dict(state[1])
        for parameter, value in zip(made, state[0], strict=True):
            parameter.data.copy_(value)
    for step in range(first, last):
        generator = torch.Generator().manual_seed(100 + step)
        for index, parameter in enumerate(made):
            gradient = torch.randn(parameter.shape, generator=generator) * 10.0 ** (index - 3)
            parameter.grad = None if index == 4 and step < 2 else gradient
        optimizer.param_groups[0]["lr"] = 0.01 / (1 + step)
        optimizer.step()
        assert all(len(group["params"]) == 3 for group in optimizer.param_groups)
    held = sum(
        moment.numel()
        for kept in optimizer.state.values()
        for moment in kept.values()
        if moment.dim()
    )
    return [parameter.detach() for parameter in made], optimizer.state_dict(), held


def check(found: Any, wanted: Any) -> None:
    for one, other in zip(found[0], wanted[0], strict=True):
        assert torch.equal(one, other)
    assert found[1]["param_groups"] == wanted[1]["param_groups"]
    assert list(found[1]["state"]) == list(wanted[1]["state"])
    for number, state in wanted[1]["state"].items():
        assert list(found[1]["state"][number]) == list(state)
        for name, value in state.items():
            assert torch.equal(found[1]["state"][number][name], value), (number, name)


# A run of two ranks with sharded moments is in tests/distributed.
@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_sharded_moments_give_the_bits_of_one_process(size: int) -> None:
    half = trained(SingleProcess(), 0, 3, None)
    wanted = trained(SingleProcess(), 0, STEPS, None)
    elements = sum(parameter.numel() for parameter in parameters())
    assert wanted[2] == 2 * elements - 2  # that of a scalar counts as none
    on_all = on_ranks(size, resumed, half)
    for whole, _ in on_all:
        check(whole, wanted)
    for _, later in on_all:
        check(later, wanted)
    for kept in range(size):
        assert on_all[kept][0][2] < 2 * elements
    assert sum(whole[2] for whole, _ in on_all) == 2 * elements


def resumed(world: World, half: Any) -> Any:
    """Run all steps, and those after the state that one process has left."""
    return trained(world, 0, STEPS, None), trained(world, 3, STEPS, half)


def test_other_float_optimizers_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"the state of SGD cannot be sharded"):
        shard_moments(torch.optim.SGD(parameters(), lr=1.0), TWO)
