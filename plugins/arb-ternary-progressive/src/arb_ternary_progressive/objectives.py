"""What a batch asks of the model: targets, and the positions that count.

Shapes: ``B`` samples, ``S`` positions, ``V`` token ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, TypeAlias, get_args

import torch
from attrs import frozen
from torch import Tensor

from arb_ternary.errors import ConfigError, DataError, nearest
from arb_ternary.protocols.data import MaskedBatch
from arb_ternary_train.evaluate import masked_loss

__all__ = ["IGNORED", "Objective", "ObjectiveTargets", "check_objective", "objective_loss", "objective_targets"]

#: ``mlm``: hidden tokens. ``clm``: the token that follows. ``custom``: what the batch says.
Objective: TypeAlias = Literal["mlm", "clm", "custom"]

#: A target that does not count, by convention of torch's cross entropy.
IGNORED: Final = -100


@frozen(eq=False)
class ObjectiveTargets:
    """What is asked.

    Attributes:
        targets: int64 ``[B, S]``.
        loss_mask: bool ``[B, S]``: positions that count.
        clm_mask: for ``clm``, bool ``[B, S]``: every position but the last, whose next token is not in the batch.
        combined_masks: for ``clm``, ``masks & clm_mask``.
    """

    targets: Tensor
    loss_mask: Tensor
    clm_mask: Tensor | None = None
    combined_masks: Tensor | None = None


def check_objective(objective: str) -> Objective:
    """``objective``, once it is known to be one.

    Raises:
        ConfigError: it is not.
    """
    for known in get_args(Objective):
        if objective == known:
            found: Objective = known
            return found
    close = nearest(str(objective), get_args(Objective))
    raise ConfigError(
        f"training_objective: must be mlm, clm or custom, not {objective!r}",
        f"did you mean {close!r}?" if close else "",
    )


def objective_targets(
    objective: Objective,
    tokens_BS: Tensor,
    masks_BS: Tensor,
    *,
    targets_BS: Tensor | None = None,
    loss_mask_BS: Tensor | None = None,
) -> ObjectiveTargets:
    """Targets and the positions that count; never more than ``masks_BS`` and ``loss_mask_BS`` allow.

    Args:
        objective: ``mlm``: the tokens themselves. ``clm``: ``targets[s] = tokens[s + 1]``; the last target repeats the
            last token and never counts. ``custom``: ``targets_BS``; where they are ``IGNORED``, nothing counts and
            the target becomes 0.
        tokens_BS: the samples before anything was hidden, int64 ``[B, S]``.
        masks_BS: bool ``[B, S]``, of the masking strategy.
        targets_BS: int64 ``[B, S]``, for ``custom``.
        loss_mask_BS: positions that may count, of the dataloader; None = all.

    Raises:
        DataError: ``custom`` without targets, or targets beside an objective that makes its own.
    """
    allowed_BS = masks_BS if loss_mask_BS is None else masks_BS & loss_mask_BS
    if objective == "custom":
        if targets_BS is None:
            raise DataError(
                "batch: has no 'targets', and the objective custom takes them from the batch",
                "Give targets [B, S] beside input_ids, or train with the objective mlm or clm.",
            )
        counts_BS = targets_BS != IGNORED
        return ObjectiveTargets(targets_BS.masked_fill(~counts_BS, 0), allowed_BS & counts_BS)
    if targets_BS is not None:
        raise DataError(
            f"batch: has 'targets', and the objective {objective} makes its own",
            "Set training_objective: custom, or leave targets out.",
        )
    if objective == "mlm":
        return ObjectiveTargets(tokens_BS.clone(), allowed_BS)
    following_BS = torch.cat((tokens_BS[:, 1:], tokens_BS[:, -1:]), dim=1)
    clm_mask_BS = torch.ones_like(masks_BS)
    clm_mask_BS[:, -1] = False
    combined_BS = allowed_BS & clm_mask_BS
    return ObjectiveTargets(following_BS, combined_BS, clm_mask_BS, combined_BS)


def objective_loss(logits_BSV: Tensor, batch: Mapping[str, Any]) -> Tensor:
    """Mean cross entropy, nats, over the positions of ``batch`` that count; 0, with a graph, where none does."""
    return masked_loss(logits_BSV, MaskedBatch(batch["input_ids"], batch["targets"], batch["loss_mask"]))
