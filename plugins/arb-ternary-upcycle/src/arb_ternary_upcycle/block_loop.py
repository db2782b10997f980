"""The training loop of one block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor, nn

from arb_ternary.protocols.data import Batch, MaskedBatch
from arb_ternary_train.schedules import RATE_FACTOR, scheduled_groups
from arb_ternary_upcycle.block_probe import BlockProbe
from arb_ternary_upcycle.judged_loop import JudgedLoop
from arb_ternary_upcycle.streams import Streams
from arb_ternary_upcycle.training_options import BlockwiseConfig
from arb_ternary_upcycle.trend import Autotune

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from arb_ternary_train.context import TrainingContext


class BlockLoop(JudgedLoop):
    """Trains a block to give the teacher's outputs; the loss is the mean L1 distance from them.

    Everything that does not learn must be frozen.

    Args:
        part: what learns: the block, or its attention.
        probe: measures the block on held-out samples; None = its state is not judged.

    Attributes:
        autotune: None if the options do not enable it.
    """

    distance_name = "held-out L1"
    #: A block is a small part of the model, and flips harm it more than small steps of its gains.
    votes_decay = 0.25
    tolerated = None
    #: They would turn trits soon after, in the next phase, whose loss is another.
    drops_votes = True

    def __init__(
        self,
        context: TrainingContext,
        options: BlockwiseConfig,
        key: str,
        *,
        block: int,
        part: nn.Module,
        streams: Streams,
        probe: BlockProbe | None,
    ) -> None:
        title = f"block {block + 1}"
        judged = probe is not None
        super().__init__(context, options, key, part=part, judged=judged, title=title)
        self._probe = probe
        self._block = block
        self._streams = streams
        self._floor = options.blockwise_autotune_min_lr
        self._lowers = options.blockwise_autotune_mode == "active"
        self.autotune: Autotune | None = None
        if options.blockwise_autotune_enabled:
            peak = max(_peak(group, options.lr) for group in scheduled_groups(self.optimizer))
            self.autotune = Autotune(
                patience=options.blockwise_autotune_plateau_patience,
                decay=options.blockwise_autotune_lr_decay,
                floor=min(1.0, self._floor / peak),
            )

    def predict(self, batch: Batch, masked: MaskedBatch) -> Tensor:
        """Return the stream after the block, or the update of its attention, ``[B, S, D]``."""
        x_BSD = self._streams.inputs(self._block, masked.inputs, batch.sample_ids)
        return self._streams.output(self._block, x_BSD)

    def held_out_distance(self) -> float:
        """Return the mean absolute difference from the teacher on held-out samples."""
        assert self._probe is not None
        return self._probe.distance()

    def loss(self, batch: Batch, masked: MaskedBatch, output: Tensor) -> Tensor:
        """Return the mean absolute difference from the teacher."""
        targets_BSD = self._streams.targets(self._block, masked.inputs, batch.sample_ids)
        return F.l1_loss(output.float(), targets_BSD)

    def count_predictions(self, masked: MaskedBatch) -> int:
        """Return the number of positions; all of them count in the loss."""
        return masked.loss_mask.numel()

    def set_rates(self) -> dict[str, float]:
        """Set the rates of the schedule, times the factor of autotuning."""
        rates = super().set_rates()
        if self.autotune is None or not self._lowers or self.autotune.factor == 1.0:
            return rates
        return lower_rates(self.optimizer, self.autotune.factor, self._floor)


def lower_rates(optimizer: Optimizer, factor: float, floor: float) -> dict[str, float]:
    """Multiply the rate of every scheduled group by ``factor``, but lower none below ``floor``.

    The rate of a ternary group decides how many votes flip a trit: ``sign_votes`` divides its
    threshold by it, ``scaled_votes`` casts fewer votes in proportion, ``momentum_votes`` raises the
    threshold until fewer trits flip in proportion.

    Returns:
        the first rate of each kind, as ``TrainingLoop.set_rates`` does.
    """
    rates: dict[str, float] = {}
    for group in scheduled_groups(optimizer):
        group["lr"] = max(min(group["lr"], floor), group["lr"] * factor)
        name = "lr" if group.get("kind", "float") == "float" else "rate"
        rates.setdefault(name, float(group["lr"]))
    return rates


def _peak(group: Mapping[str, Any], lr: float | None) -> float:
    """Return the highest rate that a schedule gives a group."""
    if lr is None or group.get("kind", "float") != "float":
        return float(group.get("initial_lr", group["lr"]))
    return lr * float(group.get(RATE_FACTOR, 1.0))
