"""How far a block of the student is from the teacher's, on held-out samples.

Shapes: ``S`` positions, ``D`` width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from arb_ternary_text.models.decoder import Decoder
from arb_ternary_upcycle.streams import block_output, recorded_updates
from arb_ternary_upcycle.teacher_module import Teacher


class BlockProbe:
    """Inputs and targets of a block on held-out samples, each of which runs alone.

    Args:
        student: its blocks before the one in training are frozen.
        teacher: of the same sizes.
        target: see ``BlockwiseConfig.distill_target``.
        samples: inputs, ``[1, S]`` each.
    """

    def __init__(
        self,
        student: Decoder,
        teacher: Teacher,
        target: Literal["residual", "attention"],
        samples: Sequence[Tensor],
    ) -> None:
        self._student = student
        self._teacher = teacher
        self._target = target
        self._samples = samples
        self._block = 0
        self._student_streams: list[Tensor] = []
        self._teacher_streams: list[Tensor] = []
        self._targets: list[Tensor] = []

    @torch.no_grad()
    def begin(self, block: int) -> None:
        """Compute inputs and targets of ``block``, which is not before the last one."""
        student = self._student
        teacher = self._teacher
        if not self._student_streams:
            self._student_streams = [student.embed(inputs) for inputs in self._samples]
            self._teacher_streams = [teacher.embed(inputs) for inputs in self._samples]
        for number in range(self._block, block):
            for row, x_1SD in enumerate(self._student_streams):
                self._student_streams[row] = student.run_blocks(x_1SD, number, number + 1)
            for row, x_1SD in enumerate(self._teacher_streams):
                self._teacher_streams[row] = teacher.run_block(number, x_1SD)
        self._block = block
        self._targets = [self._target_of(x_1SD) for x_1SD in self._teacher_streams]

    def _target_of(self, x_1SD: Tensor) -> Tensor:
        if self._target == "residual":
            return self._teacher.run_block(self._block, x_1SD)
        with recorded_updates(self._teacher.block(self._block).attention) as updates:
            self._teacher.run_block(self._block, x_1SD)
        return updates[0]

    @torch.no_grad()
    def distance(self) -> float:
        """Return the mean absolute difference between the outputs of student and teacher."""
        total = 0.0
        count = 0
        for x_1SD, target_1SD in zip(self._student_streams, self._targets, strict=True):
            output_1SD = block_output(self._student, self._block, self._target, x_1SD)
            total += float((output_1SD.float() - target_1SD).abs().double().sum())
            count += target_1SD.numel()
        return total / count
