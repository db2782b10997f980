"""How far a block of the student is from the teacher's, on held-out samples.

Shapes: ``N`` samples, ``S`` positions, ``D`` width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from arb_ternary_upcycle.streams import Streams


class BlockProbe:
    """Inputs and targets of a block on held-out samples, each of which runs alone.

    Args:
        streams: of student and teacher, with a cache of its own.
        samples_NS: the samples.
    """

    def __init__(self, streams: Streams, samples_NS: Tensor) -> None:
        self._streams = streams
        self._samples = samples_NS
        self._block = 0
        self._inputs = torch.empty(0)
        self._targets = torch.empty(0)

    def begin(self, block: int) -> None:
        """Compute inputs and targets of ``block``, which is not before the last one."""
        streams = self._streams
        streams.begin(block)
        numbers_N = torch.arange(len(self._samples))
        self._block = block
        self._inputs = streams.inputs(block, self._samples, numbers_N)
        self._targets = streams.targets(block, self._samples, numbers_N)

    @torch.no_grad()
    def distance(self) -> float:
        """Return the mean absolute difference between the outputs of student and teacher."""
        total = 0.0
        for x_SD, target_SD in zip(self._inputs, self._targets, strict=True):
            output_1SD = self._streams.output(self._block, x_SD[None])
            total += float((output_1SD.float() - target_SD).abs().double().sum())
        return total / self._targets.numel()
