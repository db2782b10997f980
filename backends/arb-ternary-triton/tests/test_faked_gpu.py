"""Calls on tensors of a GPU that is not there: they have sizes and no values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from arb_ternary.backends import ops
from arb_ternary.backends.protocol import WeightShape
from arb_ternary.backends.vote_state import new_state
from arb_ternary_triton import arguments, products
from arb_ternary_triton.arguments import packed_columns


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that would have run."""
    found: list[str] = []

    def launch(kernel: Any, *_: object, **__: object) -> None:
        found.append(kernel.__name__)

    monkeypatch.setattr(products, "launch", launch)
    monkeypatch.setattr(arguments, "serves", lambda tensor: tensor.is_cuda)
    monkeypatch.setattr(ops, "kernel", lambda _backend, op: getattr(products, op))
    return found


def test_lookup_makes_the_host_wait_for_nothing(launched: list[str]) -> None:
    shape = WeightShape(40, 64, 32)
    # Reading a value, for which a host would wait, raises in this mode.
    with FakeTensorMode():
        size = (40, packed_columns(64))
        packed = torch.empty(size, dtype=torch.uint8, device="cuda")
        exponent = torch.empty((40, 2), dtype=torch.int8, device="cuda")
        votes = torch.empty((40, 64), dtype=torch.int8, device="cuda")
        state = new_state(shape, packed, exponent, votes, "triton")
        ids = torch.empty(3, dtype=torch.int64, device="cuda")
        rows = ops.embedding.function(ids, None, state, torch.bfloat16, "float")
    assert rows.shape == (3, 64)
    assert launched == ["lookup_kernel"]
