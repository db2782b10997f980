"""Two processes decide alike, and like one process with the joined batch."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gradient_quality_control as theirs
import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import arb_ternary_gqc as gqc
from arb_ternary.errors import ConfigError
from arb_ternary.ternary.linear import TernaryLinear
from arb_ternary_votes.sign_votes import SignVotes

STEPS = 18
POISONED = 4

WRAPPERS: dict[str, Callable[..., gqc.OptimizerWrapper]] = {
    "gnts": lambda o, **k: gqc.GradientNormThreshold(o, max_batch_draws=5, threshold=0.5, **k),
    "gnr": lambda o, **k: gqc.GradientNormRescaler(o, **k),
    "sbc": lambda o, **k: gqc.ScheduledBatch(o, 4, 12, **k),
    "mht": lambda o, **k: gqc.MetricHypothesisTest(o, error_tolerance=0.6, max_batch_draws=6, **k),
    "gns": lambda o, **k: gqc.GradientNoiseScale(o, max_batch_draws=5, **k),
}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(8, 6, generator=generator, dtype=torch.float64)
    return x, x.sum(1, keepdim=True) + torch.randn(8, 1, generator=generator, dtype=torch.float64)


def loss_of(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss: Tensor = (net(x) - y).square().mean()
    return loss


def train(
    name: str, net: nn.Module, rank: int | None, mode: str, group: Any = None
) -> tuple[list[bool], Tensor]:
    """Return this rank's half of each batch, or all of it; batch 4 has NaN on one rank."""
    wrapped = net if rank is None else DistributedDataParallel(net, process_group=group)
    options = {} if rank is None else {"process_group": group, "local_gradients": mode == "local"}
    wrapper = WRAPPERS[name](torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5), **options)
    decisions = []
    for step in range(STEPS):
        x, y = batch(step)
        if step == POISONED and rank != 0:
            y = y * float("nan")
        if rank is not None:
            half = slice(4 * rank, 4 * rank + 4)
            x = x[half]
            y = y[half]
        with (
            wrapped.no_sync() if mode == "local" and rank is not None else contextlib.nullcontext()
        ):
            loss = loss_of(wrapped, x, y)
            loss.backward()
        decisions.append(wrapper.step(loss) if name == "mht" else wrapper.step())
    assert wrapper.num_dropped == 1
    return decisions, torch.cat([p.detach().flatten() for p in net.parameters()])


def drift(package: Any, rank: int, group: Any, **options: Any) -> Tensor:
    """The weights after a run in which each rank draws under ``no_sync``."""
    net = model()
    wrapped = DistributedDataParallel(net, process_group=group)
    wrapper = package.OptimizerWrapperGNTS(
        torch.optim.SGD(net.parameters(), lr=0.1), max_batch_draws=5, **options
    )
    for step in range(STEPS):
        x, y = batch(step)
        half = slice(4 * rank, 4 * rank + 4)
        with wrapped.no_sync():
            loss_of(wrapped, x[half], y[half]).backward()
        wrapper.step()
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2
    )
    group = torch.distributed.group.WORLD
    ends = {
        (name, mode): train(name, model(), rank, mode, group)
        for name in WRAPPERS
        for mode in ("reduced", "local")
    }
    ends["drift", "there"] = drift(theirs, rank, group)
    ends["drift", "here"] = drift(gqc, rank, group, process_group=group, local_gradients=True)
    torch.save(ends, f"{folder}/rank{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("ranks")
    # This file as a program: a module of pytest's has no name by which another process could import
    # it.
    subprocess.run([sys.executable, __file__, str(folder)], check=True, timeout=240)
    return [torch.load(Path(folder) / f"rank{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize("mode", ["reduced", "local"])
@pytest.mark.parametrize("name", sorted(WRAPPERS))
def test_two_ranks_decide_like_one_process(name: str, mode: str, both: list[Any]) -> None:
    (first, weights), (second, others) = (ends[name, mode] for ends in both)
    decisions, expected = train(name, model(), None, mode)
    assert first == second == decisions
    assert any(decisions)
    assert torch.equal(weights, others)
    # The joined mean is summed in another order; a sum of 18 steps of 8 samples is some thousand
    # roundings.
    torch.testing.assert_close(weights, expected, rtol=1e-11, atol=1e-11)


def test_ranks_with_local_draws_stay_together(
    both: list[Any],
) -> None:
    first, second = both
    assert not torch.allclose(first["drift", "there"], second["drift", "there"], rtol=1e-3)
    assert torch.equal(first["drift", "here"], second["drift", "here"])


def test_parameters_without_gradient_on_one_rank(tmp_path: Path) -> None:
    from arb_ternary_gqc.gradients import Gradients
    from arb_ternary_gqc.process_group import ProcessGroup

    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/r", rank=0, world_size=1
    )
    try:
        reached = nn.Parameter(torch.zeros(2))
        unreached = nn.Parameter(torch.zeros(2))
        reached.grad = torch.ones(2)
        gradients = Gradients.take([reached, unreached], ())
        ProcessGroup(torch.distributed.group.WORLD, "cpu", True).average(
            gradients, [reached, unreached]
        )
        assert torch.equal(gradients.floats[reached], torch.ones(2))
        assert unreached not in gradients.floats
        votes = SignVotes({"layer": TernaryLinear(32, 4, group_size=32)})
        with pytest.raises(ConfigError, match="votes are not reduced"):
            gqc.ScheduledBatch(votes, 1, process_group=torch.distributed.group.WORLD)
    finally:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    # Two forks of what it took several seconds to import.
    children = []
    for rank in range(2):
        if (child := os.fork()) == 0:
            try:
                work(rank, sys.argv[1])
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(child)
    statuses = [os.waitpid(child, 0)[1] for child in children]
    sys.exit(any(statuses))
