"""Masking that grows with depth: the deeper the rack, the more of each sample is hidden."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Final, Literal, TypeAlias

import torch
from attrs import frozen

from arb_ternary.config.fields import without_effect
from arb_ternary.config.options import fraction, option
from arb_ternary.protocols.data import Batch, MaskContext
from arb_ternary_progressive.masking import HidingStrategy, ReplacementOptions, RowMasks, growth_of
from arb_ternary_progressive.masks import time_key
from arb_ternary_progressive.phase_config import ProgressivePhaseConfig
from arb_ternary_progressive.time import depth_of, exponential

__all__ = ["ProgressiveMasking", "ProgressiveMaskingConfig", "Schedule", "build", "progressive_fraction"]

Schedule: TypeAlias = Literal["linear", "exponential", "cosine"]

_SCHEDULES: Final[dict[Schedule, Callable[[float], float]]] = {
    "linear": lambda progress: progress,
    "exponential": exponential,
    "cosine": lambda progress: (1.0 - math.cos(math.pi * progress)) / 2.0,
}


@frozen(kw_only=True)
class ProgressiveMaskingConfig(ReplacementOptions):
    """Options of the strategy ``progressive``."""

    schedule: Schedule = option("linear", "how the share grows with depth")
    start: float = option(0.15, "share of the positions that is hidden with the first stack", validator=fraction)
    end: float = option(0.90, "share of the positions that is hidden with the last stack", validator=fraction)

    def contradictions_in(self, run: Any, planned: Any) -> Iterator[tuple[str, str]]:
        """See ``arb_ternary.optim.protocol.Planned``. Phases that are not known here may have any depth."""
        grown = [phase.options for phase in run.phases if isinstance(phase.options, ProgressivePhaseConfig)]
        if len(grown) + sum(phase.name == "standard" for phase in run.phases) != len(run.phases):
            return
        depths = {depth_of(stack, each.target_stacks) for each in grown for stack in each.trained_stacks} | {1.0}
        if depths == {1.0}:
            yield from without_effect(self, "no phase trains a model that is not yet grown", "start", "schedule")
        elif depths == {0.0, 1.0}:
            yield from without_effect(self, "every schedule is the same at the first stack and the last", "schedule")


def progressive_fraction(depth: float, schedule: Schedule = "linear", start: float = 0.15, end: float = 0.90) -> float:
    """``start + (end - start) f(depth)`` for ``depth`` in [0, 1].

    ``f(p)`` is ``p`` (linear), ``(e**p - 1) / (e - 1)`` (exponential) or ``(1 - cos(pi p)) / 2`` (cosine).
    """
    return start + (end - start) * _SCHEDULES[schedule](depth)


class ProgressiveMasking(HidingStrategy):
    """Hides a share of each row that depends on ``GrowthContext.depth``, 1 in a run that does not grow its model."""

    def __init__(self, config: ProgressiveMaskingConfig | None = None) -> None:
        self.config = ProgressiveMaskingConfig() if config is None else config
        super().__init__(self.config)

    def rows(self, batch: Batch, generator: torch.Generator, context: MaskContext) -> RowMasks:
        """See :class:`HidingStrategy`. Depth stands for time where there is none."""
        count, config, growth = len(batch.sample_ids), self.config, growth_of(context)
        share = progressive_fraction(growth.depth, config.schedule, config.start, config.end)
        key = time_key(growth.depth if growth.time is None else growth.time)
        return RowMasks((share,) * count, (key,) * count)


def build(config: ProgressiveMaskingConfig) -> ProgressiveMasking:
    """The factory that the ``progressive`` strategy registers."""
    return ProgressiveMasking(config)
