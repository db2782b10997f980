"""Masked language modelling (Devlin et al., BERT, 2019): a fixed share of each sample is hidden."""

from __future__ import annotations

import torch

from arb_ternary.protocols.data import Batch, MaskContext
from arb_ternary_progressive.masking import HidingStrategy, RowMasks, growth_of
from arb_ternary_progressive.masking_config import MlmConfig
from arb_ternary_progressive.masks import time_key


class MlmMasking(HidingStrategy):
    """Hides ``fraction`` of each row; of the hidden tokens 80 % are masked, 10 % random, 10 %
    kept.
    """

    def __init__(self, config: MlmConfig | None = None) -> None:
        self.config = MlmConfig() if config is None else config
        super().__init__(self.config)

    def rows(self, batch: Batch, generator: torch.Generator, context: MaskContext) -> RowMasks:
        """See :class:`HidingStrategy`."""
        count = len(batch.sample_ids)
        return RowMasks(
            (self.config.fraction,) * count, (time_key(growth_of(context).time),) * count
        )


def build(config: MlmConfig) -> MlmMasking:
    """The factory that the ``mlm`` strategy registers."""
    return MlmMasking(config)
