"""What is asked of the model, and where it counts."""

from __future__ import annotations

import pytest
import torch

from arb_ternary.errors import ConfigError, DataError
from arb_ternary_progressive.objectives import IGNORED, check_objective, objective_loss, objective_targets

TOKENS = torch.tensor([[4, 5, 6, 7], [8, 9, 1, 2]])
MASKS = torch.tensor([[True, False, True, True], [False, True, False, True]])


def test_mlm_asks_for_the_tokens_themselves_where_they_are_hidden() -> None:
    asked = objective_targets("mlm", TOKENS, MASKS)
    assert torch.equal(asked.targets, TOKENS)
    assert torch.equal(asked.loss_mask, MASKS)
    assert asked.clm_mask is None
    assert asked.combined_masks is None


def test_clm_asks_for_the_next_token_and_never_counts_the_last_position() -> None:
    asked = objective_targets("clm", TOKENS, MASKS)
    assert asked.targets.tolist() == [[5, 6, 7, 7], [9, 1, 2, 2]]
    assert asked.clm_mask.tolist() == [[True, True, True, False]] * 2
    assert asked.combined_masks.tolist() == [[True, False, True, False], [False, True, False, False]]
    assert torch.equal(asked.loss_mask, asked.combined_masks)


def test_custom_takes_the_targets_of_the_batch() -> None:
    targets = torch.tensor([[0, 1, IGNORED, 3], [4, 5, 6, IGNORED]])
    asked = objective_targets("custom", TOKENS, MASKS, targets_BS=targets)
    assert asked.loss_mask.tolist() == [[True, False, False, True], [False, True, False, False]]
    assert torch.equal(asked.targets[asked.loss_mask], targets[asked.loss_mask])
    assert bool((asked.targets >= 0).all())


@pytest.mark.parametrize("objective", ["mlm", "clm", "custom"])
def test_a_loss_mask_of_the_dataloader_restricts_every_objective(objective: str) -> None:
    allowed = torch.tensor([[True, False, False, False]] * 2)
    targets = TOKENS if objective == "custom" else None
    asked = objective_targets(objective, TOKENS, MASKS, targets_BS=targets, loss_mask_BS=allowed)
    assert asked.loss_mask.tolist() == [[True, False, False, False], [False] * 4]


def test_custom_without_targets_and_targets_without_custom_are_errors() -> None:
    with pytest.raises(DataError, match="no 'targets'"):
        objective_targets("custom", TOKENS, MASKS)
    for objective in ("mlm", "clm"):
        with pytest.raises(DataError, match=f"the objective {objective} makes its own"):
            objective_targets(objective, TOKENS, MASKS, targets_BS=TOKENS)


def test_an_unknown_objective_names_the_nearest() -> None:
    assert check_objective("clm") == "clm"
    with pytest.raises(ConfigError, match="did you mean 'custom'"):
        check_objective("costum")


def test_the_loss_counts_only_where_the_mask_is_set() -> None:
    logits = torch.randn(2, 4, 10, generator=torch.Generator().manual_seed(0), requires_grad=True)
    batch = {"input_ids": TOKENS, "targets": TOKENS, "loss_mask": MASKS}
    loss = objective_loss(logits, batch)
    chosen = torch.log_softmax(logits, dim=-1).gather(2, TOKENS.unsqueeze(2)).squeeze(2)
    assert loss.item() == pytest.approx(-chosen[MASKS].mean().item(), rel=1e-6)
    loss.backward()
    assert torch.equal(logits.grad.abs().sum(dim=2) > 0, MASKS)


def test_the_loss_of_nothing_is_0_and_has_a_graph() -> None:
    logits = torch.randn(2, 4, 10, requires_grad=True)
    batch = {"input_ids": TOKENS, "targets": TOKENS, "loss_mask": torch.zeros_like(MASKS)}
    loss = objective_loss(logits, batch)
    loss.backward()
    assert loss.item() == 0.0
    assert bool((logits.grad == 0).all())
