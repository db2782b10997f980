"""A training step waits for the device a few times, however many modules there are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from arb_ternary import TernaryEmbedding, TernaryLinear, TernaryRMSNorm
from arb_ternary.backends import reference_votes
from arb_ternary.backends.dispatch import kernel
from arb_ternary.backends.protocol import WeightShape
from arb_ternary.backends.reference_votes import looked_up_rows
from arb_ternary.backends.vote_state import new_state
from arb_ternary.counters.hashing import counter_hash_rows
from arb_ternary.optim.ternary import TernaryOptimizer
from arb_ternary.ternary.models import ternary_modules
from arb_ternary.ternary.module import TernaryModule
from arb_ternary_train.update import ternary_update
from arb_ternary_votes.momentum_votes import MomentumVotes
from arb_ternary_votes.scaled_votes import ScaledVotes
from arb_ternary_votes.sign_votes import SignVotes

RULES: dict[str, Callable[[dict[str, TernaryModule]], TernaryOptimizer]] = {
    "sign_votes": lambda modules: SignVotes(modules, accum_threshold=1),
    "scaled_votes": ScaledVotes,
    "momentum_votes": MomentumVotes,
}


class Reads(TorchDispatchMode):
    """Counts numbers that are read out of tensors one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            self.found["_local_scalar_dense"] += 1
        return func(*args, **(kwargs or {}))


def model_of(depth: int, gradients: str) -> nn.Module:
    torch.manual_seed(0)
    options: Any = {"gradients": gradients, "backend": "torch"}
    layers = [
        TernaryLinear(32, 32, group_size=32, activations="float", **options) for _ in range(depth)
    ]
    return nn.Sequential(*layers, TernaryRMSNorm(32, **options))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("gradients", ["float", "int8"])
def test_step_transfers_numbers_of_all_modules_at_once(
    rule: str, gradients: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfers: Counter[int] = Counter()
    lists = Tensor.tolist
    for depth in (1, 5):
        model = model_of(depth, gradients)
        held = [t for _, m in ternary_modules(model) for t in (m.control, m.vote_limits)]

        def tolist(self: Tensor, depth: int = depth, held: list[Tensor] = held) -> Any:
            # Those of the host are not counted, nor what a kernel looks at on a CPU alone.
            transfers[depth] += all(self is not tensor for tensor in held)
            return lists(self)

        optimizer = RULES[rule](dict(ternary_modules(model)))
        x = torch.randn(8, 32)
        with monkeypatch.context() as patched:
            patched.setattr(reference_votes, "may_be", lambda _: True)
            patched.setattr("arb_ternary.backends.reference_scaled_votes.may_be", lambda _: True)
            for step in range(3):
                if step == 2:
                    patched.setattr(Tensor, "tolist", tolist)
                with Reads() as reads:
                    loss = model(x).square().mean()
                    outcome = ternary_update(model, optimizer, loss)
                assert outcome.stepped
                assert not reads.found
    assert transfers[1] == transfers[5] <= 6


@pytest.mark.parametrize("gradients", ["float", "int8"])
def test_what_the_host_reads_at_every_pass_stays_there(gradients: str) -> None:
    module = TernaryEmbedding(8, 16, gradients=gradients)
    module.to("meta")
    assert module.vote_limits.device.type == "cpu"
    state = new_state(
        WeightShape(4, 32, 32), *(torch.zeros(4, 8, dtype=torch.int8, device="meta"),) * 3, "torch"
    )
    assert state.control.device.type == state.limits.device.type == "cpu"


def test_hash_words_need_no_transfer() -> None:
    rows = torch.zeros(3, dtype=torch.int64, device="meta")
    assert counter_hash_rows(rows, 64, 1, 2, 3, rows=1 << 26).shape == (3, 64)
    ids = torch.tensor([0, (1 << 27) + 5])
    whole = counter_hash_rows(ids, 64, 1, 2, 3)
    assert torch.equal(counter_hash_rows(ids, 64, 1, 2, 3, rows=1 << 28), whole)
    assert torch.equal(counter_hash_rows(ids[:1], 64, 1, 2, 3, rows=8), whole[:1])


@pytest.mark.parametrize("op", ["sign", "scaled", "shifts"])
def test_kernels_of_the_torch_backend_never_ask_a_device(op: str) -> None:
    """A tensor of the device ``meta`` has no numbers: reading one raises."""
    shape = WeightShape(8, 64, 32)
    empty = torch.zeros(72, device="meta")
    others: dict[str, Tensor] = {}
    if op != "sign":
        kind = torch.int32 if op == "shifts" else torch.float32
        others = {"magnitudes": empty, "vote_scale": empty.to(kind)}
    weight = kernel("torch", "pack")(torch.zeros(8, 64, dtype=torch.int8, device="meta"))
    exponent = torch.zeros(8, shape.groups, dtype=torch.int8, device="meta")
    votes = torch.zeros(8, 64, dtype=torch.int8, device="meta")
    state = new_state(shape, weight, exponent, votes, "torch", **others)
    grad = torch.zeros(4, 8, device="meta")
    x = torch.zeros(4, 64, device="meta")
    q, scale = kernel("torch", "quantize_gradient")(grad, 1, 2, 3)
    if op == "shifts":
        kernel("torch", "cast_scaled_votes")(q, x.to(torch.int8), scale, state)
    else:
        kernel("torch", "cast_votes" if op == "sign" else "cast_scaled_votes")(grad, x, None, state)
    if op == "sign":
        flips = kernel("torch", "apply_votes")(state, 3, 1)
    else:
        flips = kernel("torch", "apply_scaled_votes")(state, 3, 100, True)
    assert flips.device.type == "meta"
    assert kernel("torch", "apply_exponent_votes")(state, 3, 2, 1).device.type == "meta"
    assert kernel("torch", "quantize_rows")(x)[0].device.type == "meta"


@pytest.mark.parametrize(("count", "rows"), [(7, 4), (3, 10), (40, 12), (0, 5), (5, 1)])
def test_looked_up_rows_have_sizes_known_to_the_host(count: int, rows: int) -> None:
    ids = torch.from_numpy(np.random.default_rng(count).integers(0, rows, count))
    names, order, starts, present = looked_up_rows(ids, rows)
    distinct, sizes = np.unique(ids.numpy(), return_counts=True)
    assert names.numel() == min(count, rows)
    assert names[: len(distinct)].tolist() == distinct.tolist()
    assert len(set(names.tolist())) == names.numel()
    assert starts.tolist() == [0, *np.cumsum(sizes), *[count] * (names.numel() - len(distinct))]
    for place, name in enumerate(distinct):
        assert (
            order[starts[place] : starts[place + 1]].tolist()
            == np.flatnonzero(ids.numpy() == name).tolist()
        )
    assert np.flatnonzero(present.numpy()).tolist() == distinct.tolist()
    held = looked_up_rows(torch.zeros(count, dtype=torch.int64, device="meta"), rows)
    assert [each.shape for each in held] == [each.shape for each in (names, order, starts, present)]
