"""A schedule of a wrapper's own quantity, for configs, which have no ``lr_scheduler`` for it."""

from __future__ import annotations

import math
from typing import Literal

from attrs import frozen

from arb_ternary.config.options import non_negative, option, positive, unless, when


@frozen(kw_only=True)
class QuantitySchedule:
    """How a threshold, a target norm or a batch size changes from its initial value.

    It is a function of the number of micro-batches, whether they led to a step or not. The warm-up
    is inverted, from high to the initial value, because early gradients are large.
    """

    batches: int = option(help="micro-batches until the final value", validator=positive)
    kind: Literal["cosine", "linear", "sqrt", "constant"] = option(
        "cosine", "shape of the curve to the final value"
    )
    final: float = option(
        0.2,
        "final value, as a multiple of the initial one",
        validator=non_negative,
        active_when=unless("kind", "constant"),
    )
    warmup_batches: int = option(0, "micro-batches of the inverted warm-up", validator=non_negative)
    warmup_start: float = option(
        10.0,
        "first value of the warm-up, as a multiple of the initial value",
        validator=non_negative,
        active_when=when("warmup_batches"),
    )

    def __attrs_post_init__(self) -> None:
        if self.warmup_batches > self.batches:
            raise ValueError(
                f"'warmup_batches' must be at most 'batches'; {self.warmup_batches} is more"
            )

    def value(self, initial: float, batch: int) -> float:
        """Return the quantity for micro-batch ``batch``, counted from 0."""
        if batch < self.warmup_batches:
            progress = batch / self.warmup_batches
            return initial * (self.warmup_start + progress * (1.0 - self.warmup_start))
        last = self.batches - 1
        progress = min(1.0, (batch - self.warmup_batches) / max(1, last - self.warmup_batches))
        if self.kind == "constant":
            return initial
        if self.kind == "cosine":
            share = (1.0 + math.cos(math.pi * progress)) / 2.0
            return initial * (self.final + (1.0 - self.final) * share)
        if self.kind == "sqrt":
            progress = math.sqrt(progress)
        return initial * (1.0 + (self.final - 1.0) * progress)
