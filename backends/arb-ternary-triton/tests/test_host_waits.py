"""What a step with learned exponents reads: spreads arrive with a transfer that the step makes
anyway.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from arb_ternary import TernaryLinear
from arb_ternary.backends.protocol import WeightShape
from arb_ternary.optim.ternary import TernaryOptimizer
from arb_ternary.ternary.models import ternary_modules
from arb_ternary_train.update import ternary_update
from arb_ternary_votes.scaled_votes import ScaledVotes
from arb_ternary_votes.sign_votes import SignVotes

pytestmark = pytest.mark.interpreted
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Reads(TorchDispatchMode):
    """Counts the numbers that are read out of tensors one by one."""

    found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def rule(name: str, model: nn.Module) -> TernaryOptimizer:
    modules = dict(ternary_modules(model))
    if name == "sign_votes":
        return SignVotes(modules, accum_threshold=1, e_accum_threshold=1)
    return ScaledVotes(modules, lr=0.5, exponent_rate=0.5)


@pytest.mark.parametrize("name", ["sign_votes", "scaled_votes"])
def test_spread_of_moved_exponents_is_found_on_the_host(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from arb_ternary.backends import floors

    log: list[tuple[str, floors.Arriving | None]] = []
    lists = Tensor.tolist
    begin = floors.Arriving.__init__
    read = floors.Arriving.read

    def sent(self: floors.Arriving, numbers: Tensor) -> None:
        begin(self, numbers)
        log.append(("sent", self))

    def asked(self: floors.Arriving) -> list[int]:
        log.append(("asked", self))
        with monkeypatch.context() as patched:
            patched.setattr(Tensor, "tolist", lists)
            return read(self)

    transfers = {}
    for depth in (1, 2):
        torch.manual_seed(0)
        layers = [
            TernaryLinear(32, 32, group_size=32, gradients="int8", backend="triton")
            for _ in range(depth)
        ]
        model = nn.Sequential(*layers).to(DEVICE)
        moves = 0
        host = [tensor for layer in layers for tensor in (layer.control, layer.vote_limits)]

        def tolist(self: Tensor, host: list[Tensor] = host, log: list[Any] = log) -> Any:
            if all(self is not tensor for tensor in host):
                log.append(("transfer", None))
            return lists(self)

        optimizer = rule(name, model)
        x = torch.randn(8, 32).to(DEVICE)
        with monkeypatch.context() as patched:
            patched.setattr(floors.Arriving, "__init__", sent)
            patched.setattr(floors.Arriving, "read", asked)
            patched.setattr("arb_ternary.backends.reference_votes.may_be", lambda _: True)
            patched.setattr("arb_ternary.backends.reference_scaled_votes.may_be", lambda _: True)
            patched.setattr(Tensor, "tolist", tolist)
            for step in range(3):
                if step == 1:
                    # of spreads asked for when nothing had been found out about these exponents
                    log.clear()
                    log += [
                        ("sent", floors.floors_of(each.exponent, each.shape).spreads)
                        for each in layers
                    ]
                    log.append(("transfer", None))
                with Reads() as reads:
                    outcome = ternary_update(model, optimizer, model(x).square().mean())
                assert outcome.stepped
                assert reads.found == 0
                moves += outcome.exponent_moves
        assert moves > 0
        for place, (event, which) in enumerate(log):
            if event == "asked":
                assert ("transfer", None) in log[log.index(("sent", which)) : place]
        # every product but the first layer's for x
        assert sum(event == "asked" for event, _ in log) >= 4 * depth - 2
        transfers[depth] = sum(event == "transfer" for event, _ in log)
    assert transfers[1] == transfers[2]


def test_unforeseen_spreads_are_read_on_demand() -> None:
    from arb_ternary.backends.floors import floors_of, renew_floors

    shape = WeightShape(2, 64, 32)
    exponent = torch.tensor([[-3, 1], [0, 0]], dtype=torch.int8)
    renew_floors(exponent)  # no product has asked for these: nothing to find out
    assert (floors_of(exponent, shape).row_spread, floors_of(exponent, shape).column_spread) == (
        4,
        3,
    )
    exponent[0, 0] = -1
    found = floors_of(exponent, shape)
    assert (found.row_spread, found.column_spread) == (2, 1)
    assert floors_of(exponent, shape) is found
    renew_floors(exponent)
    renewed = floors_of(exponent, shape)
    assert renewed is not found
    assert renewed.rows.tolist() == [-1, 0]
    assert renewed.columns.tolist() == [-1] * 32 + [0] * 32
