"""The phase ``global``: the whole student learns the next token and the teacher's predictions.

A student that is far from its teacher is refused: something before this phase has to be fixed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor, nn

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

#: Most that the student's held-out loss may be, in multiples of the teacher's.
MOST: Final = 1.5
#: Fewest batches of the comparison.
_BATCHES: Final = 8


class DistillingLoop(TrainingLoop):
    """Trains on ``cross entropy + kd_weight * divergence`` from ``teacher``.

    Without a teacher it trains on the cross entropy alone. If a batch has too many logits to hold,
    those of student and teacher are computed some rows at a time.
    """

    def __init__(
        self, context: TrainingContext, options: GlobalConfig, key: str, teacher: Teacher | None
    ) -> None:
        super().__init__(context, options, key)
        self._teacher = teacher
        self._weight = options.kd_weight
        self._temperature = options.kd_temperature

    def loss(self, batch: Batch, masked: MaskedBatch, output: Tensor) -> Tensor:
        """Return the loss from whole logits."""
        loss = super().loss(batch, masked, output)
        if self._teacher is None:
            return loss
        teacher_logits = self._teacher(masked.inputs)
        apart = divergence(output, teacher_logits, masked.loss_mask, self._temperature)
        return loss + self._weight * apart

    def loss_in_blocks(self, masked: MaskedBatch) -> Tensor | None:
        """Return the loss from some rows of logits at a time; None if :meth:`loss` is called."""
        student = self.model
        teacher = self._teacher
        if teacher is None or self.options.compile_model or not isinstance(student, Decoder):
            return None
        if forward_arguments(student, masked):
            return None
        if blocked_loss_model(student, masked, self.context.masking) is None:
            return None
        with torch.no_grad():
            theirs_MD = masked_rows(teacher.hidden(masked.inputs), masked)[0]
        guide = Guide(lambda rows: teacher.logits(theirs_MD[rows]), self._weight, self._temperature)
        mine_MD, targets_M = masked_rows(student.hidden(masked.inputs), masked)
        return student.mean_cross_entropy(mine_MD, targets_M, guide)


class GlobalPhase(StandardPhase):
    """Trains for ``config.steps`` steps; with ``kd_weight`` 0 as the standard phase does."""

    name = "global"

    def __init__(self, config: GlobalConfig) -> None:
        super().__init__(config)
        self.options = config

    def make_loop(self, context: TrainingContext, *, resumed: bool) -> TrainingLoop:
        """Make the loop, if the student is near enough to the teacher to begin.

        Raises:
            ConfigError: it is not.
        """
        options = self.options
        key = f"phase {context.phase_index}"
        compares = not options.force and not resumed
        if not compares and not options.kd_weight:
            return DistillingLoop(context, options, key, None)
        model = find_stage(context, options.teacher, ("teacher", "prepared"))
        as_student(context.model, model)
        teacher = Teacher(model, options.teacher_memory, context.device, options.teacher_dtype)
        loop = DistillingLoop(context, options, key, teacher if options.kd_weight else None)
        if compares:
            try:
                self._compare(context, teacher)
            except BaseException:
                loop.close()
                raise
        return loop

    def _compare(self, context: TrainingContext, teacher: Teacher) -> None:
        mine = self._held_out_loss(context, context.model)
        its = self._held_out_loss(context, teacher)
        text = (
            f"the student's held-out loss is {mine:.4f}, {mine / its:.2f} times the teacher's "
            f"{its:.4f}"
        )
        if not mine <= MOST * its:
            raise ConfigError(
                f"phases[{context.phase_index}]: {self.name}: {text}; at most {MOST} times is "
                "allowed",
                "Bring it nearer with the phases projection and blockwise (more "
                "calibration_tokens, more steps), or set force: true to train it all the same.",
            )
        context.record("comparison", {"student": mine, "teacher": its})
        context.note(f"{self.name}: {text}")

    def _held_out_loss(self, context: TrainingContext, model: nn.Module) -> float:
        options = self.options
        batches = options.eval_batches
        return evaluate(
            model,
            context.data,
            context.masking,
            batch_size=options.batch_size,
            block_size=options.block_size,
            batches=None if batches is None else max(_BATCHES, batches),
            seed=context.seed,
            device=context.device,
        ).loss


def build(config: GlobalConfig) -> GlobalPhase:
    """Build the phase ``global``."""
    return GlobalPhase(config)
