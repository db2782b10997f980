"""Losses of predictions whose logits are too many to hold: the model judges its last hidden state,
block by block.

Predictions that do not count are left out before the head multiplies.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from arb_ternary.protocols.data import MaskedBatch, MaskingStrategy
from arb_ternary_train.protocols import BlockedLogits, OwnLosses, Scores


def loss_in_blocks(
    model: nn.Module, batch: MaskedBatch, masking: MaskingStrategy, arguments: Mapping[str, Tensor]
) -> Tensor | None:
    """As ``masked_loss`` of the model's output; None where that is to be called.

    Args:
        model: any.
        batch: masked, on the model's device.
        masking: whose predictions are judged.
        arguments: of a forward pass.
    """
    found = blocked_loss_model(model, batch, masking)
    if found is None:
        return None
    hidden_BSD = found.hidden(batch.inputs, **arguments)
    hidden_MD, targets_M = masked_rows(hidden_BSD, batch)
    # Nothing counts: 0, with a graph.
    return (
        found.mean_cross_entropy(hidden_MD, targets_M)
        if len(targets_M)
        else hidden_BSD.float().sum() * 0.0
    )


def counted_losses(
    model: nn.Module, batch: MaskedBatch, masking: MaskingStrategy, arguments: Mapping[str, Tensor]
) -> Tensor | None:
    """Loss of each prediction that counts, float32 ``[M]``, without gradients; None where logits
    are to be made.
    """
    found = None if isinstance(masking, Scores) else blocked_loss_model(model, batch, masking)
    if found is None:
        return None
    hidden_MD, targets_M = masked_rows(found.hidden(batch.inputs, **arguments), batch)
    return (
        found.cross_entropies(hidden_MD, targets_M)
        if len(targets_M)
        else hidden_MD.new_zeros(0).float()
    )


def blocked_loss_model(
    model: nn.Module, batch: MaskedBatch, masking: MaskingStrategy
) -> BlockedLogits | None:
    """``model``, where it is to judge the predictions that count in ``batch`` from its hidden
    state; else None.
    """
    if isinstance(masking, OwnLosses) or not isinstance(model, BlockedLogits):
        return None
    return model if model.computes_loss_in_blocks(int(batch.loss_mask.sum())) else None


def masked_rows(hidden_BSD: Tensor, batch: MaskedBatch) -> tuple[Tensor, Tensor]:
    """The rows of ``hidden`` whose predictions count, ``[M, D]``, and their targets."""
    counts_M = batch.loss_mask.flatten()
    hidden_MD = hidden_BSD.flatten(0, -2)
    targets_M = batch.targets.flatten()
    return (
        (hidden_MD, targets_M)
        if bool(counts_M.all())
        else (hidden_MD[counts_M], targets_M[counts_M])
    )
