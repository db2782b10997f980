"""A schedule of a wrapper's own quantity for runs that have no ``torch.optim.lr_scheduler``: those
from a config.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal

from attrs import frozen

from arb_ternary.config.fields import without_effect
from arb_ternary.config.options import non_negative, option, positive


@frozen(kw_only=True)
class QuantitySchedule:
    """How a threshold, a target norm or a batch size goes on from its initial value.

    It is counted in micro-batches, whether they led to a step or not, and is a function of their
    number alone. The warm-up is inverted: from high to the initial value, because early gradients
    are large.
    """

    batches: int = option(help="micro-batches until the final value", validator=positive)
    kind: Literal["cosine", "linear", "sqrt", "constant"] = option(
        "cosine", "way to the final value"
    )
    final: float = option(
        0.2, "final value, as a multiple of the initial one", validator=non_negative
    )
    warmup_batches: int = option(0, "micro-batches of the inverted warm-up", validator=non_negative)
    warmup_start: float = option(
        10.0, "where the warm-up starts, as a multiple of the initial value", validator=non_negative
    )

    def __attrs_post_init__(self) -> None:
        if self.warmup_batches > self.batches:
            raise ValueError(
                f"'warmup_batches' must be at most 'batches'; {self.warmup_batches} is more"
            )

    def validate_in_run(self, run: Any, planned: Any) -> Iterator[tuple[str, str]]:
        """Options of a way, or of a warm-up, that is not taken."""
        if self.kind == "constant":
            yield from without_effect(self, "'kind' is constant", "final")
        if self.warmup_batches == 0:
            yield from without_effect(self, "'warmup_batches' is 0", "warmup_start")

    def value(self, initial: float, batch: int) -> float:
        """The quantity for micro-batch ``batch``, from 0."""
        if batch < self.warmup_batches:
            return initial * (
                self.warmup_start + batch / self.warmup_batches * (1.0 - self.warmup_start)
            )
        last = self.batches - 1
        progress = min(1.0, (batch - self.warmup_batches) / max(1, last - self.warmup_batches))
        if self.kind == "constant":
            return initial
        if self.kind == "cosine":
            return initial * (
                self.final + (1.0 - self.final) * (1.0 + math.cos(math.pi * progress)) / 2.0
            )
        return initial * (
            1.0 + (self.final - 1.0) * (math.sqrt(progress) if self.kind == "sqrt" else progress)
        )
