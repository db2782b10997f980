"""Runs loaded without accumulators compute the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from arb_ternary.errors import UsageProblem
from arb_ternary.ternary.models import ternary_modules
from arb_ternary_train.audit import audit
from arb_ternary_train.checkpoint import read_checkpoint
from arb_ternary_train.model_state import load_state
from arb_ternary_train.restore import load_run, measure


class _Asked(Mapping[str, Tensor]):
    """Tensors that record which of them were accessed."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors
        self.names: list[str] = []

    def __getitem__(self, name: str) -> Tensor:
        self.names.append(name)
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def outline(self, name: str) -> Tensor:
        return self.tensors[name]


def _bytes(model: nn.Module) -> int:
    """Return the bytes of all parameters and buffers; none share memory."""
    tensors = [*model.parameters(), *model.buffers()]
    assert len({tensor.data_ptr() for tensor in tensors if tensor.nbytes}) == sum(
        bool(t.nbytes) for t in tensors
    )
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def test_run_without_accumulators_evaluates_the_same(tiny: Any) -> None:
    run, report = tiny.run("run")
    computes = load_run(run.path)
    learns = load_run(run.path, accumulators=True)
    weights = sum(
        module.shape.out_features * module.shape.in_features
        for _, module in ternary_modules(learns.model)
    )
    assert weights > 0
    assert _bytes(learns.model) - _bytes(computes.model) == weights  # a byte each
    assert measure(computes)[0].loss == report.validation_loss
    assert audit(computes.model) == audit(learns.model)


def test_with_accumulators_a_run_has_the_bytes_of_its_checkpoint(tiny: Any) -> None:
    run, _ = tiny.run("run")
    wanted = read_checkpoint(run.checkpoints / "step-00000008").model
    found = load_run(run.path, accumulators=True).model.state_dict()
    assert set(found) == set(wanted)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert any(name.endswith(".votes") and bool(tensor.any()) for name, tensor in found.items())


def test_accumulators_are_not_read_and_other_tensors_once(tiny: Any) -> None:
    run, _ = tiny.run("run")
    loaded = load_run(run.path)
    asked = _Asked(dict(loaded.checkpoint.model.items()))
    load_state(loaded.model, asked, "here")
    assert sorted(asked.names) == sorted(name for name in asked if not name.endswith(".votes"))


def test_training_what_was_read_back_to_compute_with_is_refused(tiny: Any) -> None:
    run, _ = tiny.run("run")
    model = load_run(run.path).model.train()
    with pytest.raises(UsageProblem, match="loaded without its accumulators"):
        model(torch.zeros(1, 4, dtype=torch.int64)).sum().backward()
