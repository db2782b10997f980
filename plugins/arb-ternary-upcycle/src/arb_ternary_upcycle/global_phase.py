"""The phase ``global``: all of the student learns the next token, and, where it is asked to, the
teacher's predictions.

A student that is far from its teacher is not trained further by this phase: there is something
before it to mend.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from arb_ternary.errors import ConfigError
from arb_ternary.protocols.data import Batch, MaskedBatch
from arb_ternary_text.models.blocked_loss import Guide
from arb_ternary_text.models.decoder import Decoder
from arb_ternary_train.blocked import blocked_loss_model, masked_rows
from arb_ternary_train.evaluate import evaluate, forward_arguments
from arb_ternary_train.loop import TrainingLoop
from arb_ternary_train.standard import StandardPhase
from arb_ternary_upcycle.distillation import divergence
from arb_ternary_upcycle.stages import find_stage
from arb_ternary_upcycle.teacher_module import Teacher, as_student
from arb_ternary_upcycle.training_options import GlobalConfig

if TYPE_CHECKING:
    from arb_ternary_train.context import TrainingContext

#: The student may begin with a held-out loss of so many times the teacher's.
MOST: Final = 1.5
#: Batches of the comparison at least.
_BATCHES: Final = 8


class DistillingLoop(TrainingLoop):
    """Trains on ``cross entropy + kd_weight * divergence`` from ``teacher``; None = on the cross
    entropy alone.

    Where the logits of a batch are too many to hold, those of student and teacher are made some
    rows at a time.
    """

    def __init__(
        self, context: TrainingContext, options: GlobalConfig, key: str, teacher: Teacher | None
    ) -> None:
        super().__init__(context, options, key)
        self._teacher = teacher
        self._weight = options.kd_weight
        self._temperature = options.kd_temperature

    def loss(self, batch: Batch, masked: MaskedBatch, output: Tensor) -> Tensor:
        """See the class."""
        loss = super().loss(batch, masked, output)
        if self._teacher is None:
            return loss
        apart = divergence(
            output, self._teacher(masked.inputs), masked.loss_mask, self._temperature
        )
        return loss + self._weight * apart

    def loss_in_blocks(self, masked: MaskedBatch) -> Tensor | None:
        """See the class; None where ``loss`` and ``predict`` are called."""
        student = self.model
        teacher = self._teacher
        if teacher is None or self.options.compile_model or not isinstance(student, Decoder):
            return None
        if (
            forward_arguments(student, masked)
            or blocked_loss_model(student, masked, self.context.masking) is None
        ):
            return None
        with torch.no_grad():
            theirs_MD = masked_rows(teacher.hidden(masked.inputs), masked)[0]
        guide = Guide(lambda rows: teacher.logits(theirs_MD[rows]), self._weight, self._temperature)
        mine_MD, targets_M = masked_rows(student.hidden(masked.inputs), masked)
        return student.mean_cross_entropy(mine_MD, targets_M, guide)


class GlobalPhase(StandardPhase):
    """Trains for ``config.steps`` steps; with ``kd_weight`` 0 a loop of the standard phase."""

    name = "global"

    def __init__(self, config: GlobalConfig) -> None:
        super().__init__(config)
        self.options = config

    def make_loop(self, context: TrainingContext, *, resumed: bool) -> TrainingLoop:
        """The loop, when the student is near enough to the teacher to begin.

        Raises:
            ConfigError: it is not.
        """
        options = self.options
        teacher = None
        asks = not (options.force or resumed)
        if asks or options.kd_weight:
            model = find_stage(context, options.teacher, ("teacher", "prepared"))
            as_student(context.model, model)
            teacher = Teacher(model, options.teacher_memory, context.device, options.teacher_dtype)
        loop = DistillingLoop(
            context, options, f"phase {context.phase_index}", teacher if options.kd_weight else None
        )
        if asks and teacher is not None:
            try:
                self._compare(context, teacher)
            except BaseException:
                loop.close()
                raise
        return loop

    def _compare(self, context: TrainingContext, teacher: Teacher) -> None:
        options = self.options
        shape: Mapping[str, Any] = {
            "batch_size": options.batch_size,
            "block_size": options.block_size,
            "batches": None
            if options.eval_batches is None
            else max(_BATCHES, options.eval_batches),
            "seed": context.seed,
            "device": context.device,
        }
        mine, its = (
            evaluate(model, context.data, context.masking, **shape).loss
            for model in (context.model, teacher)
        )
        text = (
            f"the student's held-out loss is {mine:.4f}, {mine / its:.2f} times the teacher's "
            f"{its:.4f}"
        )
        if not mine <= MOST * its:
            raise ConfigError(
                f"phases[{context.phase_index}]: {self.name}: {text}; at most {MOST} times is "
                f"allowed",
                "Bring it nearer with the phases projection and blockwise (more of "
                "calibration_tokens, more steps), or set force: true to train it all the same.",
            )
        context.record("comparison", {"student": mine, "teacher": its})
        context.note(f"{self.name}: {text}")


def build(config: GlobalConfig) -> GlobalPhase:
    """The factory that the ``global`` phase registers."""
    return GlobalPhase(config)
