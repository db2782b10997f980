"""Objectives: targets, and the positions that count."""

from __future__ import annotations

import pytest
import torch

from arb_ternary.errors import DataError
from arb_ternary.protocols.data import Batch, MaskContext, MaskedBatch
from arb_ternary_progressive.objectives import IGNORED, ObjectiveMasking, clm_mask
from arb_ternary_train.evaluate import masked_loss

TOKENS = torch.tensor([[4, 5, 6, 7], [8, 9, 1, 2]])
MASKS = torch.tensor([[True, False, True, True], [False, True, False, True]])


class Chosen:
    """Chooses the positions of ``MASKS``, and hides nothing."""

    def apply(self, batch: Batch, generator: torch.Generator, context: MaskContext) -> MaskedBatch:
        tokens = batch.data[:, :-1]
        return MaskedBatch(tokens, tokens, MASKS)


def ask(objective: str, **extras: torch.Tensor) -> MaskedBatch:
    batch = Batch(torch.cat((TOKENS, TOKENS[:, -1:]), dim=1), torch.arange(2), extras)
    made, masks = ObjectiveMasking(Chosen(), objective).prepare(
        batch, torch.Generator(), MaskContext(0, 0, 10)
    )
    assert torch.equal(masks, MASKS)
    return made


def test_mlm_targets_are_the_hidden_tokens() -> None:
    asked = ask("mlm")
    assert torch.equal(asked.targets, TOKENS)
    assert torch.equal(asked.loss_mask, MASKS)


def test_clm_targets_are_the_next_tokens() -> None:
    asked = ask("clm")
    assert asked.targets.tolist() == [[5, 6, 7, 7], [9, 1, 2, 2]]
    assert clm_mask(MASKS).tolist() == [[True, True, True, False]] * 2
    assert asked.loss_mask.tolist() == [[True, False, True, False], [False, True, False, False]]


def test_custom_targets_come_from_the_batch() -> None:
    targets = torch.tensor([[0, 1, IGNORED, 3], [4, 5, 6, IGNORED]])
    asked = ask("custom", targets=targets)
    assert asked.loss_mask.tolist() == [[True, False, False, True], [False, True, False, False]]
    assert torch.equal(asked.targets[asked.loss_mask], targets[asked.loss_mask])
    assert bool((asked.targets >= 0).all())


@pytest.mark.parametrize("objective", ["mlm", "clm", "custom"])
def test_a_loss_mask_restricts_every_objective(objective: str) -> None:
    allowed = torch.tensor([[True, False, False, False]] * 2)
    given = {"targets": TOKENS} if objective == "custom" else {}
    asked = ask(objective, loss_mask=allowed, **given)
    assert asked.loss_mask.tolist() == [[True, False, False, False], [False] * 4]


def test_custom_and_targets_need_each_other() -> None:
    with pytest.raises(DataError, match="no 'targets'"):
        ask("custom")
    for objective in ("mlm", "clm"):
        with pytest.raises(DataError, match=f"the objective {objective} makes its own"):
            ask(objective, targets=TOKENS)


def test_the_loss_counts_only_where_the_mask_is_set() -> None:
    logits = torch.randn(2, 4, 10, generator=torch.Generator().manual_seed(0), requires_grad=True)
    batch = MaskedBatch(TOKENS, TOKENS, MASKS)
    loss = masked_loss(logits, batch)
    chosen = torch.log_softmax(logits, dim=-1).gather(2, TOKENS.unsqueeze(2)).squeeze(2)
    assert loss.item() == pytest.approx(-chosen[MASKS].mean().item(), rel=1e-6)
    loss.backward()
    assert torch.equal(logits.grad.abs().sum(dim=2) > 0, MASKS)


def test_the_loss_of_no_position_is_0_with_a_graph() -> None:
    logits = torch.randn(2, 4, 10, requires_grad=True)
    batch = MaskedBatch(TOKENS, TOKENS, torch.zeros_like(MASKS))
    loss = masked_loss(logits, batch)
    loss.backward()
    assert loss.item() == 0.0
    assert bool((logits.grad == 0).all())
