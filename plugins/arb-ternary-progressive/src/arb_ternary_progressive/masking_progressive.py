"""Masking that grows with depth: the deeper the rack, the more of each sample is hidden."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import torch

from arb_ternary.protocols.data import Batch, MaskContext
from arb_ternary_progressive.masking import HidingStrategy, RowMasks, growth_of
from arb_ternary_progressive.masking_config import ProgressiveMaskingConfig, Schedule
from arb_ternary_progressive.masks import time_key
from arb_ternary_progressive.time import exponential

_SCHEDULES: Final[dict[Schedule, Callable[[float], float]]] = {
    "linear": lambda progress: progress,
    "exponential": exponential,
    "cosine": lambda progress: (1.0 - math.cos(math.pi * progress)) / 2.0,
}


def progressive_fraction(
    depth: float, schedule: Schedule = "linear", start: float = 0.15, end: float = 0.90
) -> float:
    """``start + (end - start) f(depth)`` for ``depth`` in [0, 1].

    ``f(p)`` is ``p`` (linear), ``(e**p - 1) / (e - 1)`` (exponential) or ``(1 - cos(pi p)) / 2``
    (cosine).
    """
    return start + (end - start) * _SCHEDULES[schedule](depth)


class ProgressiveMasking(HidingStrategy):
    """Hides a share of each row that depends on ``GrowthContext.depth``, 1 in a run that does not
    grow its model.
    """

    def __init__(self, config: ProgressiveMaskingConfig | None = None) -> None:
        self.config = ProgressiveMaskingConfig() if config is None else config
        super().__init__(self.config)

    def rows(self, batch: Batch, generator: torch.Generator, context: MaskContext) -> RowMasks:
        """See :class:`HidingStrategy`. Depth stands for time where there is none."""
        count = len(batch.sample_ids)
        config = self.config
        growth = growth_of(context)
        share = progressive_fraction(growth.depth, config.schedule, config.start, config.end)
        key = time_key(growth.depth if growth.time is None else growth.time)
        return RowMasks((share,) * count, (key,) * count)


def build(config: ProgressiveMaskingConfig) -> ProgressiveMasking:
    """The factory that the ``progressive`` strategy registers."""
    return ProgressiveMasking(config)
