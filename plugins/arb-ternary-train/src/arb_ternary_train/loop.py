"""The training loop: micro-batches in, optimizer steps out, resumable between any two
micro-batches.

A micro-batch whose loss is not finite keeps its place among those of its step, but never reaches
the backward pass: it casts no vote and adds no gradient. Where none of a step has a finite loss, no
step is taken. What an optimizer may declare is in ``arb_ternary.optim.protocol``: one that defers
its step keeps gradients and votes, and neither ``zero_grad`` is called nor does the schedule
advance before a real step.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from arb_ternary.config.choice import OptimizerChoice
from arb_ternary.errors import ConfigError
from arb_ternary.optim.protocol import (
    StepOutcome,
    as_outcome,
    collect_trainable,
    may_defer,
    may_refuse,
    takes_loss_signal,
)
from arb_ternary.optim.ternary import TernaryOptimizer
from arb_ternary.protocols.data import Batch, BatchRequest, MaskContext, MaskedBatch
from arb_ternary.ternary.models import reset_runtime_state, ternary_modules
from arb_ternary_train.blocked import loss_in_blocks
from arb_ternary_train.build import require_protocol
from arb_ternary_train.evaluate import block_size_of, forward_arguments, masked_loss
from arb_ternary_train.fine_tuning import FineTuning
from arb_ternary_train.in_flight import InFlight, Outcome, in_flight_state, load_in_flight
from arb_ternary_train.model_options import apply_model_options, to_device
from arb_ternary_train.optim.joined import JoinedOptimizer
from arb_ternary_train.policy import Adjustment, Diverged, Drawn, Skip, StepPolicy
from arb_ternary_train.precision import autocast_for, scaler_for
from arb_ternary_train.protocols import CarriesState
from arb_ternary_train.schedules import apply_schedule
from arb_ternary_train.seeding import (
    derive_seed,
    derived_generator,
    global_rng_state,
    restore_global_rng,
)
from arb_ternary_train.step_report import StepReport
from arb_ternary_train.threads import settle_threads

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from arb_ternary_train.context import TrainingContext
    from arb_ternary_train.options import LoopOptions


class TrainingLoop:
    """Trains ``context.model`` with ``options``. Close it when done: it may own threads that read
    ahead.

    A phase calls :meth:`train_microbatch` until ``step`` has reached ``options.steps``. One that
    masks, predicts or judges in another way overrides :meth:`mask`, :meth:`predict` or
    :meth:`loss`; one whose rates follow more than the schedule, :meth:`set_rates`. What is frozen
    when the loop is made is not trained, nor is what its options freeze until it is closed.

    Args:
        context: the run.
        options: how to train.
        key: tells the random choices of this loop from those of other loops of the run.

    Attributes:
        step: optimizer steps taken.
        microbatches: micro-batches drawn.
        skipped: micro-batches without a finite loss.
        batches: where micro-batches come from.
        optimizer: what trains the model.
        voters: the ternary modules that it trains by votes.
        optimizer_choice: what it was made from: the config's, or what a policy has put in its
            place.
        adjustment: what a policy has made of rates and clipping.
        policy: decides how the loop goes on; None = nothing does.

    Raises:
        ConfigError: an option that this model, device or optimizer cannot do.
    """

    def __init__(self, context: TrainingContext, options: LoopOptions, key: str) -> None:
        self.context = context
        self.options = options
        self.key = key
        self.step = self.microbatches = self.skipped = 0
        self._skipped_in_a_row = 0
        self._in_flight = InFlight()
        self.model = context.model
        device = context.device
        apply_model_options(self.model, options, device)
        self._tuning = FineTuning(self.model, options, f"phases[{context.phase_index}]")
        settle_threads(context, options, key)
        self._scaler = scaler_for(device, options.use_amp, options.amp_dtype)
        self.adjustment = Adjustment()
        self._schedule = context.world.microbatch_schedule(
            options.gradient_accumulation_steps,
            context.config.ranks,
            compiled=options.compile_model,
        )
        self.optimizer_choice: OptimizerChoice = context.config.optimizer
        self._take_on(context.make_optimizer(factors=self._tuning.factors))
        seed = derive_seed(context.seed, key, "order")
        request = BatchRequest(
            options.batch_size,
            options.block_size,
            seed,
            options.order,
            options.num_workers,
            options.pin_memory,
        )
        self.batches = context.data.batches(request)
        self._forward: Any = torch.compile(self.model) if options.compile_model else self.model
        judged = (type(self).predict, type(self).loss) != (TrainingLoop.predict, TrainingLoop.loss)
        self._wants_logits = judged or options.compile_model
        trainable = collect_trainable(self.model)
        votes = bool(trainable.ternary or trainable.stored)
        self._autocast = autocast_for(device, options.use_amp, options.amp_dtype, ternary=votes)
        context.evaluation_shape = (
            options.batch_size,
            block_size_of(context.data, options.block_size),
        )
        self._untold: deque[Drawn] = deque()
        self._reached = 0
        self.policy: StepPolicy | None = None
        if options.policy is not None:
            self.policy = require_protocol(options.policy.build(), StepPolicy, options.policy)
            self.policy.begin(self)

    def close(self) -> None:
        """Stop reading ahead, and let learn again what the options have frozen."""
        if self.policy is not None:
            self.policy.close()
        self.batches.close()
        self._tuning.release()

    def use_optimizer(self, choice: OptimizerChoice) -> None:
        """Train with the optimizer of ``choice`` from the next step on. What the last one kept is
        not handed over.

        Raises:
            ConfigError: it cannot train the model, or not with the loop's options.
        """
        self._take_on(self.context.make_optimizer(choice, self._tuning.factors))
        self.optimizer_choice = choice

    def _take_on(self, optimizer: Optimizer) -> None:
        if self.options.grad_clip is not None and may_defer(optimizer):
            raise ConfigError(
                f"grad_clip: the optimizer {self.optimizer_choice.name!r} decides over sums of "
                "several gradients, and clipping would act on a partial sum",
                "Remove grad_clip.",
            )
        self.optimizer = optimizer
        self._takes_loss_signal = takes_loss_signal(optimizer)
        self.voters = self._schedule.prepare(self.model, optimizer)
        for _, module in ternary_modules(self.model):
            # A loss that is not finite casts no votes here, so that only what looks at gradients
            # can have to undo them.
            module.undoable = self._scaler is not None or may_refuse(optimizer)

    def train_microbatch(self) -> StepReport | None:
        """Train on one micro-batch; the report if the optimizer stepped, None if the step needs
        more of them.

        A policy may train on several, which are then told one at a time: ``step`` is that of the
        last one told, and the run is held back from evaluations, checkpoints and stops until all
        are.

        Raises:
            Diverged: too many micro-batches in a row had no finite loss.
        """
        try:
            drawn = self.draw() if self.policy is None else self._next_of(self.policy)
        except Diverged as error:
            self._record((*error.earlier, error.skip))
            raise
        self._record(drawn.skips)
        return drawn.report

    def _next_of(self, policy: StepPolicy) -> Drawn:
        if not self._untold:
            self.context.settle()
            before = self.step
            self._untold.extend(policy.advance(self))
            self._reached = self.step
            self.step = before
        drawn = self._untold.popleft()
        self.context.held = bool(self._untold)
        if not self._untold:
            self.step = self._reached
        elif drawn.report is not None:
            self.step = drawn.report.step
        return drawn

    def _record(self, skips: Sequence[Skip]) -> None:
        for skip in skips:
            self.context.record_skip(skip.what, skip.value, skip.microbatch)

    def draw(self) -> Drawn:
        """Train on one micro-batch, or on a whole step where several ranks do so together, and tell
        nobody.

        Raises:
            Diverged: too many in a row had no finite loss.
        """
        started = time.perf_counter()
        before = self.microbatches
        rates = self.adjustment.apply(self.optimizer, self.set_rates())
        own: list[Outcome] = []
        for index in self._schedule.indices(self, self._in_flight.microbatch_index, own):
            outcome, share = self._forward_on(index)
            if share is not None:
                share.backward()  # type: ignore[no-untyped-call]
            own.append(outcome)
        outcomes = self._schedule.gather_outcomes(own)
        self.context.mark_progress()
        skips: tuple[Skip, ...] = ()
        for number, outcome in enumerate(outcomes, before + 1):
            self._in_flight = self._in_flight.plus(outcome)
            if not outcome.finite:
                skips = (*skips, self._skip("loss", outcome.loss, number, skips))
        drawn = Drawn(skips=skips)
        if self._in_flight.accumulated == self.options.gradient_accumulation_steps:
            if self._in_flight.cast:
                drawn = self._try_to_step(rates, skips)
            else:
                self._in_flight = self._in_flight.attempted(dropped=True)
        tokens = sum(outcome.tokens for outcome in outcomes)
        self.context.logbook.count_training(tokens, time.perf_counter() - started)
        return drawn

    def _forward_on(self, index: int) -> tuple[Outcome, Tensor | None]:
        """Run forward on the next micro-batch, which has this ``index`` in its step.

        Returns:
            Its outcome, and its share of the loss to start backward from: None if its loss is not
            finite.
        """
        if not self.batches.continues:
            reset_runtime_state(self.model)
        batch = next(self.batches)
        masked = self.mask(batch).to(self.context.device)
        self.microbatches += 1
        for module in self.voters:
            module.begin_microbatch(index)
        self.model.train()
        with self._autocast():
            loss = self.loss_in_blocks(masked)
        if loss is None:
            with self._autocast():
                output = self.predict(batch, masked)
            loss = self.loss(batch, masked, output)
        outcome = Outcome(float(loss.detach()), int(masked.loss_mask.sum()))
        if not outcome.finite:
            reset_runtime_state(self.model)
            return outcome, None
        if self.options.gradient_accumulation_steps > 1:
            loss = loss / self.options.gradient_accumulation_steps
        return outcome, loss if self._scaler is None else self._scaler.scale(loss)

    def mask(self, batch: Batch) -> MaskedBatch:
        """``batch`` masked, for the micro-batch number ``microbatches``: a pure function of seed,
        step and number.
        """
        context = self.context
        generator = derived_generator(context.seed, self.key, "mask", self.step, self.microbatches)
        mask_context = MaskContext(
            step=self.step, seed=context.seed, vocabulary_size=context.vocabulary_size
        )
        return context.masking.apply(batch, generator, mask_context)

    def predict(self, batch: Batch, masked: MaskedBatch) -> Tensor:
        """Output of the model for a micro-batch: logits ``[*targets.shape, V]``, or what the
        masking judges.

        Args:
            batch: as it was read, on the host.
            masked: what the masking made of it, on the device.
        """
        logits: Tensor = self._forward(masked.inputs, **forward_arguments(self.model, masked))
        return logits

    def loss(self, batch: Batch, masked: MaskedBatch, output: Tensor) -> Tensor:
        """What backward starts from: a float32 scalar, the mean over the predictions that count.

        Args:
            batch: as it was read, on the host.
            masked: what the masking made of it, on the device.
            output: what :meth:`predict` returned.
        """
        return masked_loss(output, masked, self.context.masking)

    def loss_in_blocks(self, masked: MaskedBatch) -> Tensor | None:
        """As :meth:`loss` of what :meth:`predict` returns, without all logits at once; None where
        these two are called.

        A loop that overrides one of the two is asked for logits, unless it overrides this method as
        well.
        """
        if self._wants_logits:
            return None
        return loss_in_blocks(
            self.model, masked, self.context.masking, forward_arguments(self.model, masked)
        )

    def set_rates(self) -> dict[str, float]:
        """Set every group's rate, before every micro-batch; returns the first ``lr`` (float) and
        ``rate`` (ternary).
        """
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

    def _try_to_step(self, rates: Mapping[str, float], skips: tuple[Skip, ...]) -> Drawn:
        in_flight = self._in_flight
        if self.policy is not None:
            self.policy.before_step(self)
        grad_norm = self._clip()
        mean = math.fsum(in_flight.recent) / len(in_flight.recent)
        outcome = self._step_optimizer({"loss_signal": mean} if self._takes_loss_signal else {})
        if outcome.skipped:
            norm = math.nan if outcome.grad_norm is None else outcome.grad_norm
            skips = (*skips, self._skip("gradient", norm, self.microbatches, skips))
        if not outcome.stepped:
            self._in_flight = in_flight.attempted(dropped=outcome.skipped)
            return Drawn(skips=skips)
        self.optimizer.zero_grad()
        self.step += 1
        self._skipped_in_a_row = 0
        self._in_flight = InFlight()
        report = StepReport(
            step=self.step,
            loss=math.fsum(in_flight.losses) / len(in_flight.losses),
            outcome=outcome,
            rates=rates,
            draws=len(in_flight.losses),
            tokens=sum(in_flight.tokens),
            grad_norm=grad_norm,
        )
        return Drawn(report, skips)

    def _step_optimizer(self, signals: Mapping[str, float]) -> StepOutcome:
        optimizer = self.optimizer
        scaler = self._scaler
        if scaler is None:
            return as_outcome(optimizer.step(**signals), optimizer)  # type: ignore[call-overload]
        before = scaler.get_scale()
        outcome = as_outcome(scaler.step(optimizer, **signals), optimizer)
        scaler.update()
        # the scaler found a gradient that is not finite and did not call the optimizer
        if scaler.get_scale() < before:
            if isinstance(optimizer, TernaryOptimizer | JoinedOptimizer):
                return optimizer.skip_update()
            optimizer.zero_grad()
            return StepOutcome(stepped=False, skipped=True)
        return outcome

    def _clip(self) -> float | None:
        adjusted = self.adjustment.grad_clip
        limit = self.options.grad_clip if adjusted == "configured" else adjusted
        if limit is None:
            return None
        if self._scaler is not None:
            self._scaler.unscale_(self.optimizer)
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        return float(nn.utils.clip_grad_norm_(parameters, limit)) if parameters else None

    def _skip(self, what: str, value: float, microbatch: int, earlier: tuple[Skip, ...]) -> Skip:
        self.skipped += 1
        self._skipped_in_a_row += 1
        skip = Skip(what, value, microbatch)
        if self._skipped_in_a_row >= self.options.max_skipped:
            raise Diverged(
                f"step {self.context.step + 1}: {self._skipped_in_a_row} micro-batches in a row "
                f"had no finite {what}; the last was {value}",
                "Lower the learning rate, or continue from an earlier checkpoint: --resume PATH.",
                skip,
                earlier,
            )
        return skip

    def state_dict(self) -> dict[str, Any]:
        """Everything but the model's own state. The tensors are those in use: copy them to keep
        them.
        """
        if self._untold:
            raise RuntimeError(
                "the loop has not told all of its steps, and cannot be saved between them"
            )
        policy = {} if self.policy is None else {"policy": self.policy.state_dict()}
        return {**self.training_state(), **policy}

    def training_state(self) -> dict[str, Any]:
        """As :meth:`state_dict`, without the policy's."""
        return {
            "step": self.step,
            "micro_batches": self.microbatches,
            "skipped": self.skipped,
            "skipped_in_a_row": self._skipped_in_a_row,
            "sampler": self.batches.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": None if self._scaler is None else self._scaler.state_dict(),
            "in_flight": in_flight_state(self.model, self._in_flight),
            "runtime": self.model.runtime_state() if isinstance(self.model, CarriesState) else None,
            "rng": global_rng_state(self.context.device),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where ``state`` was taken, on a model that holds the weights of that
        moment.
        """
        if self.policy is not None:
            self.policy.load_state_dict(self, state["policy"])
        self.load_training_state(state)

    def load_training_state(self, state: Mapping[str, Any]) -> None:
        """As :meth:`load_state_dict`, without the policy's; its tensors may be used on."""
        device = self.context.device
        self.step = state["step"]
        self.microbatches = state["micro_batches"]
        self.skipped = state["skipped"]
        self._skipped_in_a_row = state["skipped_in_a_row"]
        self.batches.load_state_dict(state["sampler"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self._scaler is not None and state["scaler"] is not None:
            self._scaler.load_state_dict(state["scaler"])
        self._in_flight = load_in_flight(self.model, state["in_flight"], device)
        if state["runtime"] is not None and isinstance(self.model, CarriesState):
            self.model.load_runtime_state(to_device(state["runtime"], device))
        restore_global_rng(state["rng"], device)
