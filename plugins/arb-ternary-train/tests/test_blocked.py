"""Losses without whole logits, in training and evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from arb_ternary.config.yaml_document import dump_yaml
from arb_ternary.protocols.data import MaskedBatch
from arb_ternary_text.data.masking import CausalMasking
from arb_ternary_text.models import transformer
from arb_ternary_text.models.transformer import Transformer
from arb_ternary_train.blocked import counted_losses, loss_in_blocks
from arb_ternary_train.evaluate import masked_loss
from arb_ternary_train.loading import load_config
from arb_ternary_train.metrics import read_metrics
from arb_ternary_train.progress import Silent
from arb_ternary_train.runner import RunRequest, train


class Table(nn.Module):
    """A model whose logits are rows of a table; it records which rows it judges in blocks."""

    def __init__(self, willing: bool = True) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(7, 7, generator=torch.Generator().manual_seed(0)))
        self.willing = willing
        self.asked = 0
        self.judged = 0

    def forward(self, inputs: Tensor) -> Tensor:
        return self.hidden(inputs)

    def computes_loss_in_blocks(self, predictions: int) -> bool:
        self.asked = predictions
        return self.willing

    def hidden(self, inputs: Tensor) -> Tensor:
        return self.table[inputs]

    def mean_cross_entropy(self, hidden: Tensor, targets: Tensor) -> Tensor:
        self.judged = len(targets)
        return F.cross_entropy(hidden, targets)

    def cross_entropies(self, hidden: Tensor, targets: Tensor) -> Tensor:
        self.judged = len(targets)
        return F.cross_entropy(hidden, targets, reduction="none").detach()


class Judge(CausalMasking):
    """Has losses of its own."""

    loss_unit = "points"

    def losses(self, output: Tensor, batch: MaskedBatch) -> Tensor:
        return output.sum(-1).flatten()


class Scored(CausalMasking):
    """Scores whole logits."""

    def scores(self, output: Tensor, batch: MaskedBatch) -> dict[str, Tensor]:
        return {"right": (output.argmax(-1) == batch.targets).float().flatten()}


def batch_of(counts: list[bool]) -> MaskedBatch:
    ids = torch.arange(6).view(2, 3)
    return MaskedBatch(ids, ids.flip(0), torch.tensor(counts).view(2, 3))


def test_only_predictions_that_count_reach_the_head() -> None:
    batch = batch_of([True, False, True, True, False, False])
    model = Table()
    loss = loss_in_blocks(model, batch, CausalMasking(), {})
    assert loss is not None
    assert (model.asked, model.judged) == (3, 3)
    torch.testing.assert_close(loss, masked_loss(model(batch.inputs), batch))
    losses = counted_losses(model, batch, CausalMasking(), {})
    assert losses is not None
    torch.testing.assert_close(losses.mean(), loss.detach())


def test_the_loss_is_0_with_a_graph_where_nothing_counts() -> None:
    batch = batch_of([False] * 6)
    model = Table()
    loss = loss_in_blocks(model, batch, CausalMasking(), {})
    losses = counted_losses(model, batch, CausalMasking(), {})
    assert loss is not None
    assert losses is not None
    assert losses.shape == (0,)
    assert loss.item() == 0.0
    loss.backward()
    assert model.table.grad is not None
    assert not model.table.grad.any()


def test_logits_are_made_where_somebody_needs_them() -> None:
    batch = batch_of([True] * 6)
    for model, masking in (
        (nn.Identity(), CausalMasking()),
        (Table(False), CausalMasking()),
        (Table(), Judge()),
    ):
        assert loss_in_blocks(model, batch, masking, {}) is None
        assert counted_losses(model, batch, masking, {}) is None
    assert counted_losses(Table(), batch, Scored(), {}) is None
    assert loss_in_blocks(Table(), batch, Scored(), {}) is not None


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_run_learns_as_it_does_from_whole_logits(
    accumulate: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question. " * 30)
    phase = {"name": "standard", "steps": 4, "eval_every": 2, "batch_size": 2, "block_size": 16}
    config = {
        "data": {"name": "text", "path": str(tmp_path / "text.txt")},
        "model": {"name": "decoder", "width": 32, "layers": 1, "heads": 2, "max_length": 16},
        "optimizer": {"name": "sign_votes"},
        "phases": [{**phase, "gradient_accumulation_steps": accumulate}],
    }
    (tmp_path / "run.yaml").write_text(dump_yaml(config))

    def losses(name: str) -> list[float]:
        request = RunRequest(directory=tmp_path / name, reporter=Silent)
        train(load_config(tmp_path / "run.yaml").config, request)
        lines: list[dict[str, Any]] = read_metrics(tmp_path / name / "metrics.jsonl")
        return [line[key] for line in lines for key in ("loss", "validation_loss") if key in line]

    whole = losses("whole")
    monkeypatch.setattr(transformer, "MANY_LOGITS", 1)
    made: list[Tensor] = []
    logits = Transformer.logits
    monkeypatch.setattr(Transformer, "logits", lambda self, x: (made.append(x), logits(self, x))[1])
    blocks = losses("blocks")
    assert not made
    assert len(whole) > 4
    assert blocks == pytest.approx(whole, rel=1e-4)
