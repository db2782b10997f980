"""The training loop: owns the state of training, and calls :func:`train_step`.

A loop can stop between any two micro-batches and continue there after a resume.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from attrs import evolve
from torch import Tensor

from arb_ternary.config.choice import OptimizerChoice
from arb_ternary.errors import ConfigError
from arb_ternary.optim.protocol import collect_trainable, may_defer, may_refuse, takes_loss_signal
from arb_ternary.protocols.data import Batch, BatchRequest, MaskContext, MaskedBatch
from arb_ternary.ternary.models import reset_runtime_state, ternary_modules
from arb_ternary_train.blocked import loss_in_blocks
from arb_ternary_train.build import require_protocol
from arb_ternary_train.evaluate import block_size_of, forward_arguments, masked_loss
from arb_ternary_train.fine_tuning import FineTuning
from arb_ternary_train.loop_state import InFlight, LoopState
from arb_ternary_train.microbatches import DrawnMicrobatch
from arb_ternary_train.model_options import apply_model_options
from arb_ternary_train.policy import Adjustment, StepPolicy
from arb_ternary_train.precision import autocast_for, scaler_for
from arb_ternary_train.schedules import apply_schedule
from arb_ternary_train.seeding import derive_seed, derived_generator, preserved_global_rng
from arb_ternary_train.step import Diverged, Skip, StepReport, StepResult, train_step
from arb_ternary_train.threads import set_loop_threads

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from arb_ternary_train.context import TrainingContext
    from arb_ternary_train.options import LoopOptions


class TrainingLoop:
    """Trains ``context.model`` with ``options``. Close it at the end: it may own threads.

    A phase calls :meth:`train_microbatch` until ``step`` has reached ``options.steps``. A subclass
    overrides :meth:`mask`, :meth:`predict` or :meth:`loss` to mask, predict or judge differently,
    and :meth:`set_rates` to set rates by more than the schedule. Parameters that are frozen when
    the loop is made are not trained. What its options freeze is frozen until the loop is closed.

    Args:
        context: the run.
        options: how to train.
        key: distinguishes the random choices of this loop from those of other loops of the run.

    Attributes:
        step: optimizer steps taken.
        microbatches: micro-batches trained on.
        drawn: micro-batches of the step under way that were drawn ahead.
        skipped: micro-batches and gradients that were dropped because they were not finite.
        skipped_in_a_row: those since the last step.
        in_flight: the micro-batches since the last step.
        batches: where micro-batches come from.
        optimizer: what trains the model.
        optimizer_choice: the config of ``optimizer``: the run's, or one that a policy has chosen.
        scaler: scales the loss if training in float16; disabled otherwise.
        schedule: assigns the micro-batches of a step to processes.
        voters: the ternary modules that the optimizer trains by votes.
        gradient_observers: called with the loop before each step, when the gradients of the step
            are complete and not yet clipped.
        adjustment: how a policy has changed rates and clipping.
        policy: decides how the loop continues; None = nothing does.

    Raises:
        ConfigError: this model, device or optimizer does not support an option.
    """

    def __init__(self, context: TrainingContext, options: LoopOptions, key: str) -> None:
        self.context = context
        self.options = options
        self.key = key
        self.model = context.model
        self.step = 0
        self.microbatches = 0
        self.skipped = 0
        self.skipped_in_a_row = 0
        self.in_flight = InFlight()
        self.drawn: deque[DrawnMicrobatch] = deque()

        if options.warmup_steps > options.steps and options.lr_schedule != "none":
            context.note(
                f"warmup_steps: {options.warmup_steps} is more than the {options.steps} steps; "
                "rates rise to their peak until the last one"
            )

        # The model.
        device = context.device
        apply_model_options(self.model, options, device)
        self._tuning = FineTuning(self.model, options, f"phases[{context.phase_index}]")
        set_loop_threads(context, options, key)
        self._forward: Any = torch.compile(self.model) if options.compile_model else self.model
        overridden = (type(self).predict, type(self).loss)
        overrides = overridden != (TrainingLoop.predict, TrainingLoop.loss)
        self._needs_logits = overrides or options.compile_model

        # The optimizer.
        self.scaler = scaler_for(device, options.use_amp, options.amp_dtype)
        self.adjustment = Adjustment()
        self.schedule = context.world.microbatch_schedule(
            options.gradient_accumulation_steps,
            context.config.ranks,
            compiled=options.compile_model,
        )
        self.optimizer_choice: OptimizerChoice = context.config.optimizer
        self._set_optimizer(context.make_optimizer(factors=self._tuning.factors))
        votes = bool(collect_trainable(self.model).ternary)
        self._autocast = autocast_for(device, options.use_amp, options.amp_dtype, ternary=votes)

        # The data.
        request = BatchRequest(
            options.batch_size,
            options.block_size,
            derive_seed(context.seed, key, "order"),
            options.order,
            options.num_workers,
            options.pin_memory,
        )
        self.batches = context.data.batches(request)
        block_size = block_size_of(context.data, options.block_size)
        context.evaluation_shape = (options.batch_size, block_size)

        # Steps that a policy has taken and that the loop has not reported yet, and the step that
        # the loop has when all of them are reported.
        self._pending_reports: deque[StepResult] = deque()
        self._steps_taken = 0
        self.gradient_observers: list[Callable[[TrainingLoop], None]] = []
        self.policy: StepPolicy | None = None
        if options.policy is not None:
            self.policy = require_protocol(options.policy.build(), StepPolicy, options.policy)
            self.gradient_observers.append(self.policy.before_step)
            self.policy.begin(self)

    def close(self) -> None:
        """Stop reading ahead, and unfreeze what the options have frozen."""
        if self.policy is not None:
            self.policy.close()
        self.batches.close()
        self._tuning.release()

    # --- the optimizer

    def use_optimizer(self, choice: OptimizerChoice) -> None:
        """Train with the optimizer of ``choice`` from the next step on; it starts without state.

        Raises:
            ConfigError: it cannot train the model, or not with the loop's options.
        """
        self._set_optimizer(self.context.make_optimizer(choice, self._tuning.factors))
        self.optimizer_choice = choice

    def _set_optimizer(self, optimizer: Optimizer) -> None:
        """Prepare model and ``optimizer`` to train together."""
        if self.options.grad_clip is not None and may_defer(optimizer):
            raise ConfigError(
                f"grad_clip: the optimizer {self.optimizer_choice.name!r} decides over sums of "
                "several gradients, and clipping would act on a partial sum",
                "Remove grad_clip.",
            )
        self.optimizer = optimizer
        self._takes_loss_signal = takes_loss_signal(optimizer)
        self.voters = self.schedule.prepare(self.model, optimizer)
        # A loss that is not finite casts no votes here. Votes have to be undone if a float gradient
        # is not finite, or if the optimizer or the scaler refuses a gradient.
        trains_floats = any(parameter.requires_grad for parameter in self.model.parameters())
        undoable = trains_floats or self.scaler.is_enabled() or may_refuse(optimizer)
        for _, module in ternary_modules(self.model):
            module.undoable = undoable

    # --- training

    def train_microbatch(self) -> StepReport | None:
        """Train on one micro-batch and record what was skipped.

        With a policy several steps may be taken at once. They are then reported one at a time:
        ``step`` is the step that was reported last, and the run defers evaluations, checkpoints and
        stops until all are reported.

        Returns:
            The report if the optimizer stepped, None if the step needs more micro-batches.

        Raises:
            Diverged: too many micro-batches in a row had no finite loss.
        """
        try:
            result = train_step(self) if self.policy is None else self._next_result(self.policy)
        except Diverged as error:
            self._record(error.skips)
            raise
        self._record(result.skips)
        return result.report

    def train_step(self) -> StepResult:
        """Train on one micro-batch without reporting it, as a policy does.

        Raises:
            Diverged: too many micro-batches in a row had no finite loss.
        """
        return train_step(self)

    def _next_result(self, policy: StepPolicy) -> StepResult:
        """Return the next result to report; have ``policy`` train if there is none."""
        pending = self._pending_reports
        if not pending:
            self.context.flush_deferred()
            reported = self.step
            pending.extend(policy.advance(self))
            self._steps_taken = self.step
            self.step = reported
        result = pending.popleft()
        self.context.reporting_behind = bool(pending)
        if not pending:
            self.step = self._steps_taken
        elif result.report is not None:
            self.step = result.report.step
        return result

    def _record(self, skips: tuple[Skip, ...]) -> None:
        for skip in skips:
            self.context.record_skip(skip.what, skip.value, skip.microbatch)

    # --- the parts of a step

    def apply_rates(self) -> dict[str, float]:
        """Set the rate of every group, and return the first ``lr`` (float) and ``rate`` (ternary).

        A policy may have adjusted the rates of the schedule.
        """
        return self.adjustment.apply(self.optimizer, self.set_rates())

    def set_rates(self) -> dict[str, float]:
        """Set the rate of every group by the schedule; see :meth:`apply_rates`."""
        options = self.options
        return apply_schedule(
            self.optimizer,
            options.lr_schedule,
            self.step,
            steps=options.steps,
            warmup=options.warmup_steps,
            lr=options.lr,
            min_lr=options.min_lr,
            min_rate=options.min_rate,
        )

    def draw_microbatch(self, number: int) -> None:
        """Read and mask the next micro-batch, the loop's with this ``number``, into ``drawn``."""
        # After a resume within a step its micro-batches are drawn again; the global generators are
        # those of later.
        again = self.in_flight.accumulated > 0
        with preserved_global_rng(self.context.device) if again else nullcontext():
            position = self.batches.state_dict()
            continues = self.batches.continues
            batch = next(self.batches)
            trained = self.microbatches
            self.microbatches = number
            masked = self.mask(batch)
            self.microbatches = trained
        predictions = self.count_predictions(masked)
        self.drawn.append(DrawnMicrobatch(number, position, continues, batch, masked, predictions))

    def next_microbatch(self, index: int) -> DrawnMicrobatch:
        """Return the first of ``drawn`` to train on; it has this ``index`` within its step."""
        drawn = self.drawn.popleft()
        if not drawn.continues:
            reset_runtime_state(self.model)
        self.microbatches = drawn.number + 1
        for module in self.voters:
            module.begin_microbatch(index)
        return drawn

    def mask(self, batch: Batch) -> MaskedBatch:
        """Mask ``batch``: a pure function of seed, step and number of the micro-batch.

        All micro-batches of a step are masked before the first is trained on.
        """
        context = self.context
        generator = derived_generator(context.seed, self.key, "mask", self.step, self.microbatches)
        mask_context = MaskContext(
            step=self.step, seed=context.seed, vocabulary_size=context.vocabulary_size
        )
        return context.masking.apply(batch, generator, mask_context)

    def count_predictions(self, masked: MaskedBatch) -> int:
        """Return the number of predictions that the loss of a micro-batch is the mean of.

        A subclass whose :meth:`loss` is the mean of others than those of ``loss_mask`` overrides
        it.
        """
        return int(masked.loss_mask.sum())

    def compute_loss(self, batch: Batch, masked: MaskedBatch) -> Tensor:
        """Return the loss of a micro-batch, with its graph."""
        self.model.train()
        with self._autocast():
            loss = self.loss_in_blocks(masked)
        if loss is not None:
            return loss
        with self._autocast():
            output = self.predict(batch, masked)
        return self.loss(batch, masked, output)

    def loss_in_blocks(self, masked: MaskedBatch) -> Tensor | None:
        """Return the loss without holding all logits at once.

        None if the caller has to call :meth:`predict` and :meth:`loss`. That is so for a loop that
        overrides one of them, unless it overrides this method as well.
        """
        if self._needs_logits:
            return None
        arguments = forward_arguments(self.model, masked)
        return loss_in_blocks(self.model, masked, self.context.masking, arguments)

    def predict(self, batch: Batch, masked: MaskedBatch) -> Tensor:
        """Run the model: return logits ``[*targets.shape, V]``, or what the masking judges.

        Args:
            batch: as it was read, on the host.
            masked: the masked batch, on the device.
        """
        logits: Tensor = self._forward(masked.inputs, **forward_arguments(self.model, masked))
        return logits

    def loss(self, batch: Batch, masked: MaskedBatch, output: Tensor) -> Tensor:
        """Return the mean loss over the predictions that count, a float32 scalar.

        Args:
            batch: as it was read, on the host.
            masked: the masked batch, on the device.
            output: what :meth:`predict` returned.
        """
        return masked_loss(output, masked, self.context.masking)

    @property
    def clip_norm(self) -> float | None:
        """Largest norm of the gradients of float parameters; None = they are not clipped."""
        adjusted = self.adjustment.grad_clip
        return self.options.grad_clip if adjusted == "configured" else adjusted

    def signals(self, mean_loss: float) -> dict[str, float]:
        """Return the keyword arguments of the optimizer's ``step``."""
        return {"loss_signal": mean_loss} if self._takes_loss_signal else {}

    def count_step(self) -> None:
        """Count an optimizer step; nothing is in flight after it."""
        self.step += 1
        self.skipped_in_a_row = 0
        self.in_flight = InFlight()

    def count_skip(self, skip: Skip, skips: list[Skip]) -> None:
        """Count a skip and append it to ``skips``, those of the step under way.

        Raises:
            Diverged: there have been ``options.max_skipped`` in a row.
        """
        self.skipped += 1
        self.skipped_in_a_row += 1
        skips.append(skip)
        if self.skipped_in_a_row >= self.options.max_skipped:
            raise Diverged(
                f"step {self.context.step + 1}: {self.skipped_in_a_row} micro-batches in a row "
                f"had no finite {skip.what}; the last was {skip.value}",
                "Lower the learning rate, or continue from an earlier checkpoint: --resume PATH.",
                tuple(skips),
            )

    # --- state

    def state_dict(self) -> dict[str, Any]:
        """Return everything but the model's own state. The tensors are those in use.

        Raises:
            RuntimeError: steps have been taken that are not reported yet.
        """
        if self._pending_reports:
            raise RuntimeError(
                "the loop has not reported all of its steps, and cannot be saved between them"
            )
        policy = None if self.policy is None else self.policy.state_dict()
        return evolve(LoopState.collect(self), policy=policy).to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where ``state`` was taken.

        The model must hold the weights of that moment.
        """
        if self.policy is not None:
            self.policy.load_state_dict(self, state["policy"])
        LoopState.from_dict(state).restore(self)
