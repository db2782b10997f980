"""Conditions under which block kernels may be used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from arb_ternary.config.yaml_document import dump_yaml
from arb_ternary_text.models.attention import Attention
from arb_ternary_text.models.block_kernels import may_round_differently
from arb_ternary_train.exact_arithmetic import exact_arithmetic
from arb_ternary_train.loading import load_config
from arb_ternary_train.progress import Silent
from arb_ternary_train.restore import load_run, measure
from arb_ternary_train.runner import RunRequest, train


def test_exact_runs_round_like_torch() -> None:
    assert may_round_differently()
    with exact_arithmetic():
        assert not may_round_differently()
        with exact_arithmetic(False):
            assert may_round_differently()
        assert not may_round_differently()
    assert may_round_differently()


def test_a_compiled_graph_consists_of_torch_operations() -> None:
    def doubled_where_kernels_may_compute(x: Tensor) -> Tensor:
        return x * 2 if may_round_differently() else x

    compiled: Any = torch.compile(
        doubled_where_kernels_may_compute, backend="eager", fullgraph=True
    )
    assert compiled(torch.ones(1)) == 1
    assert doubled_where_kernels_may_compute(torch.ones(1)) == 2


@pytest.mark.parametrize("exact", [False, True])
def test_a_run_and_its_evaluations_know_whether_they_are_exact(
    exact: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be, that is the question. " * 30)
    config = {
        "exact": exact,
        "data": {"name": "text", "path": str(text)},
        "model": {"name": "decoder", "width": 32, "layers": 1, "heads": 2, "max_length": 16},
        "optimizer": {"name": "sign_votes"},
        "phases": [
            {"name": "standard", "steps": 1, "eval_every": 1, "batch_size": 2, "block_size": 16}
        ],
    }
    (tmp_path / "run.yaml").write_text(dump_yaml(config))
    seen: list[bool] = []
    forward = Attention.forward

    def watched(self: Attention, *arguments: Any) -> Tensor:
        seen.append(may_round_differently())
        return forward(self, *arguments)

    monkeypatch.setattr(Attention, "forward", watched)
    train(
        load_config(tmp_path / "run.yaml").config,
        RunRequest(directory=tmp_path / "run", reporter=Silent),
    )
    assert len(seen) > 1
    before = len(seen)
    measure(load_run(tmp_path / "run"), batches=1)
    assert len(seen) > before
    assert set(seen) == {not exact}
    assert may_round_differently()
