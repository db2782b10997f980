"""The phase ``global``: the whole student learns the next token and the teacher's predictions.

A student that is far from its teacher is refused: something before this phase has to be fixed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from arb_ternary.errors import ConfigError
from arb_ternary.protocols.data import Batch, MaskedBatch
from arb_ternary_text.models.blocked_loss import Guide
from arb_ternary_text.models.decoder import Decoder
from arb_ternary_train.blocked import blocked_loss_model, masked_rows
from arb_ternary_train.evaluate import evaluate, forward_arguments
from arb_ternary_train.standard import StandardPhase
from arb_ternary_upcycle.calibration import held_out_batches
from arb_ternary_upcycle.distillation import divergence
from arb_ternary_upcycle.judged_loop import JudgedLoop
from arb_ternary_upcycle.stages import find_stage
from arb_ternary_upcycle.teacher_module import Teacher, as_student
from arb_ternary_upcycle.training_options import GlobalConfig

if TYPE_CHECKING:
    from arb_ternary_train.context import TrainingContext
    from arb_ternary_train.loop import TrainingLoop
    from arb_ternary_train.step import StepReport

#: Most that the student's held-out loss may be, in multiples of the teacher's.
MOST: Final = 1.5
#: Fewest batches of the comparison.
_BATCHES: Final = 8
#: Predictions whose logits are compared at a time.
_ROWS: Final = 256


class DivergenceProbe:
    """Measures a student's divergence from ``teacher`` on held-out samples, some rows at a time."""

    def __init__(self, context: TrainingContext, teacher: Teacher, options: GlobalConfig) -> None:
        self._teacher = teacher
        self._batches = held_out_batches(
            context, tokens=options.probe_tokens, block_size=options.block_size
        )
        #: The teacher's hidden states of the predictions that count, on the host.
        self._theirs = [
            masked_rows(teacher.hidden(batch.inputs), batch)[0].cpu() for batch in self._batches
        ]

    @torch.no_grad()
    def distance(self, student: Decoder) -> float:
        """Return ``KL(teacher || student)`` in nats, the mean over the predictions that count."""
        total = 0.0
        count = 0
        for batch, theirs_MD in zip(self._batches, self._theirs, strict=True):
            hidden: Any = student.hidden
            arguments = forward_arguments(student, batch)
            mine_MD, _ = masked_rows(hidden(batch.inputs, **arguments), batch)
            for start in range(0, len(mine_MD), _ROWS):
                mine_mD = mine_MD[start : start + _ROWS]
                theirs_mD = theirs_MD[start : start + _ROWS].to(mine_mD.device)
                counts_m = torch.ones(len(mine_mD), dtype=torch.bool, device=mine_mD.device)
                mean = divergence(
                    student.logits(mine_mD), self._teacher.logits(theirs_mD), counts_m, 1.0
                )
                total += float(mean) * len(mine_mD)
            count += len(mine_MD)
        return total / max(1, count)


class DistillingLoop(JudgedLoop):
    """Trains on ``cross entropy + kd_weight * divergence`` from ``teacher``.

    Without a teacher it trains on the cross entropy alone. If a batch has too many logits to hold,
    those of student and teacher are computed some rows at a time. The state is judged by the
    divergence, without a teacher by the cross entropy.
    """

    votes_decay = 0.5
    #: The divergence may rise for a while and then fall below all before.
    tolerated = 1.5
    drops_votes = False

    def __init__(
        self, context: TrainingContext, options: GlobalConfig, key: str, teacher: Teacher | None
    ) -> None:
        judged = options.probe_tokens > 0
        super().__init__(
            context, options, key, part=context.model, judged=judged, title=GlobalPhase.name
        )
        self.distance_name = "held-out loss" if teacher is None else "held-out divergence"
        self._config = options
        self._teacher = teacher
        self._probe: DivergenceProbe | None = None
        self._weight = options.kd_weight
        self._temperature = options.kd_temperature

    def train_microbatch(self) -> StepReport | None:
        """See ``JudgedLoop``; end with the best state."""
        report = super().train_microbatch()
        if report is not None and report.step == self.options.steps:
            self.finish(self.context.step + 1)  # the last step is recorded afterwards
        return report

    @torch.no_grad()
    def held_out_distance(self) -> float:
        """Return the mean divergence from the teacher; without one, the mean cross entropy."""
        options = self._config
        if self._teacher is None:
            batches = -(-options.probe_tokens // (options.batch_size * options.block_size))
            return held_out_loss(self.context, self.model, options, batches)
        if self._probe is None:
            self._probe = DivergenceProbe(self.context, self._teacher, options)
        return self._probe.distance(as_student(self.model, self._teacher.model))

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
        batches = self.options.eval_batches
        if batches is not None:
            batches = max(_BATCHES, batches)
        mine = held_out_loss(context, context.model, self.options, batches)
        its = held_out_loss(context, teacher, self.options, batches)
        text = (
            f"the student's held-out loss is {mine:.4f}, {mine / its:.2f} times the teacher's "
            f"{its:.4f}, in samples of {self.options.block_size} tokens"
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


def held_out_loss(
    context: TrainingContext, model: nn.Module, options: GlobalConfig, batches: int | None
) -> float:
    """Return the loss of a model on ``batches`` batches of held-out samples; None = all."""
    return evaluate(
        model,
        context.data,
        context.masking,
        batch_size=options.batch_size,
        block_size=options.block_size,
        batches=batches,
        seed=context.seed,
        device=context.device,
    ).loss
