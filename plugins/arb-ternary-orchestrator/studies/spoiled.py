"""A masking strategy for studies: for some steps of training every id is drawn at random, as in a
damaged shard.
"""

from __future__ import annotations

import torch
from attrs import evolve, frozen

from arb_ternary import hookimpl
from arb_ternary.config.options import non_negative, option
from arb_ternary.protocols.data import Batch, MaskContext, MaskedBatch
from arb_ternary.specs import MaskingSpec
from arb_ternary_text.data.masking import CausalMasking

ARB_API_VERSION = (1, 0)


@frozen(kw_only=True)
class SpoiledConfig:
    """Options of ``spoiled``."""

    first: int = option(0, "first step whose batches are spoiled, from 0", validator=non_negative)
    steps: int = option(0, "how many steps", validator=non_negative)


class SpoiledMasking(CausalMasking):
    """Next-token prediction, but for steps ``first`` to ``first + steps``: there, of noise."""

    def __init__(self, config: SpoiledConfig) -> None:
        super().__init__()
        self.config = config

    def apply(self, batch: Batch, generator: torch.Generator, context: MaskContext) -> MaskedBatch:
        """See the class."""
        config = self.config
        if context.training and config.first <= context.step < config.first + config.steps:
            data = torch.randint(context.vocabulary_size, batch.data.shape, generator=generator)
            batch = evolve(batch, data=data)
        return super().apply(batch, generator, context)


@hookimpl
def arb_register_masking() -> list[MaskingSpec]:
    return [
        MaskingSpec(name="spoiled", target="spoiled:SpoiledMasking", config="spoiled:SpoiledConfig")
    ]
