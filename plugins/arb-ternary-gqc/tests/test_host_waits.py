"""A decision makes the host wait for the device a fixed number of times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from arb_ternary import TernaryLinear
from arb_ternary.ternary.models import ternary_modules
from arb_ternary_gqc import gns, gnts, gradients, wrapper
from arb_ternary_gqc.gns import GradientNoiseScale
from arb_ternary_gqc.gnts import GradientNormThreshold
from arb_ternary_gqc.sbc import ScheduledBatch
from arb_ternary_gqc.wrapper import OptimizerWrapper
from arb_ternary_votes.sign_votes import SignVotes

WRAPPERS: dict[str, Callable[[torch.optim.Optimizer], OptimizerWrapper]] = {
    "gnts": lambda inner: GradientNormThreshold(inner, 3, threshold=1e-9),
    "gnts by group": lambda inner: GradientNormThreshold(inner, 3, threshold=1e-9, per_group=True),
    "gns": lambda inner: GradientNoiseScale(inner, 1e-9, 3, "norm_variance"),
    "sbc": lambda inner: ScheduledBatch(inner, 1, 3),
}


class Reads(TorchDispatchMode):
    """Counts the numbers that are read out of tensors one by one."""

    found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["float", "ternary"])
@pytest.mark.parametrize("name", WRAPPERS)
def test_a_draw_takes_at_most_two_transfers(
    name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfers: list[int] = []
    bring = gradients.on_host

    def counted(scalars: Sequence[Tensor]) -> list[Tensor]:
        found = bring(scalars)
        transfers.append(len(found))
        return found

    for user in (wrapper, gnts, gns):
        monkeypatch.setattr(user, "on_host", counted)
    taken = {}
    for depth in (1, 4):
        torch.manual_seed(0)
        if kind == "float":
            model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(depth)))
            inner: torch.optim.Optimizer = torch.optim.SGD(
                [{"params": each.parameters()} for each in model], lr=0.1
            )
        else:
            model = nn.Sequential(
                *(TernaryLinear(32, 32, activations="float", backend="torch") for _ in range(depth))
            )
            inner = SignVotes(dict(ternary_modules(model)), accum_threshold=1)
        optimizer = WRAPPERS[name](inner)
        x = torch.randn(4, 8 if kind == "float" else 32)
        transfers.clear()
        stepped = []
        for _ in range(3):
            loss = model(x).square().mean()
            loss.backward()
            with Reads() as reads:
                stepped.append(optimizer.step(loss_signal=loss))
            assert reads.found == 0
        assert stepped == ([False, True, False] if name == "gns" else [False, False, True])
        taken[depth] = len(transfers)
    assert taken[1] == taken[4] <= 6


def test_on_host_keeps_numbers() -> None:
    given = [
        torch.tensor(0.1),
        torch.tensor(0.1, dtype=torch.float64),
        torch.tensor(3.0, dtype=torch.bfloat16),
    ]
    for scalar, number in zip(given, gradients.on_host(given), strict=True):
        assert number.dtype == scalar.dtype
        assert number.device.type == "cpu"
        assert torch.equal(number, scalar)
