"""Losses of predictions whose logits are too many to hold.

The model judges its last hidden state block by block. Predictions that do not count are left out
before the head multiplies.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from arb_ternary.protocols.data import MaskedBatch, MaskingStrategy
from arb_ternary_train.protocols import BlockedLogits, OwnLosses, Scores


def loss_in_blocks(
    model: nn.Module, batch: MaskedBatch, masking: MaskingStrategy, arguments: Mapping[str, Tensor]
) -> Tensor | None:
    """Return ``masked_loss`` of the model's output; None if the caller has to call that function.

    Args:
        model: the model.
        batch: masked batch, on the model's device.
        masking: the masking strategy, which may judge predictions itself.
        arguments: keyword arguments of a forward pass.
    """
    judge = blocked_loss_model(model, batch, masking)
    if judge is None:
        return None
    hidden_BSD = judge.hidden(batch.inputs, **arguments)
    hidden_MD, targets_M = masked_rows(hidden_BSD, batch)
    if not len(targets_M):
        # Nothing counts: 0, with a graph.
        return hidden_BSD.float().sum() * 0.0
    return judge.mean_cross_entropy(hidden_MD, targets_M)


def counted_losses(
    model: nn.Module, batch: MaskedBatch, masking: MaskingStrategy, arguments: Mapping[str, Tensor]
) -> Tensor | None:
    """Return the loss of each prediction that counts, float32 ``[M]``, without gradients.

    None if the caller has to make logits.
    """
    if isinstance(masking, Scores):
        return None
    judge = blocked_loss_model(model, batch, masking)
    if judge is None:
        return None
    hidden_MD, targets_M = masked_rows(judge.hidden(batch.inputs, **arguments), batch)
    if not len(targets_M):
        return hidden_MD.new_zeros(0).float()
    return judge.cross_entropies(hidden_MD, targets_M)


def blocked_loss_model(
    model: nn.Module, batch: MaskedBatch, masking: MaskingStrategy
) -> BlockedLogits | None:
    """Return ``model`` if it judges the predictions of ``batch`` in blocks, else None."""
    if isinstance(masking, OwnLosses) or not isinstance(model, BlockedLogits):
        return None
    return model if model.computes_loss_in_blocks(int(batch.loss_mask.sum())) else None


def masked_rows(hidden_BSD: Tensor, batch: MaskedBatch) -> tuple[Tensor, Tensor]:
    """Return the rows of ``hidden`` whose predictions count, ``[M, D]``, and their targets."""
    counts_M = batch.loss_mask.flatten()
    hidden_MD = hidden_BSD.flatten(0, -2)
    targets_M = batch.targets.flatten()
    if bool(counts_M.all()):
        return hidden_MD, targets_M
    return hidden_MD[counts_M], targets_M[counts_M]
