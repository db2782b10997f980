"""The training loop: micro-batches in, optimizer steps out, resumable between any two micro-batches.

What a loop asks of an optimizer beyond ``torch.optim.Optimizer``, all of it optional:

* ``step()`` may return a ``StepOutcome``, or a bool with the ``StepOutcome`` in ``last_outcome``. ``stepped=False``
  defers: gradients and votes stay, the loop draws the next micro-batch, and neither ``zero_grad`` is called nor does
  the schedule advance before a real step.
* ``step`` may take ``loss_signal``: the mean loss of the micro-batches since the last call, a number.
* ``defers`` is true on one that may defer; gradient clipping is then refused, for it would clip a partial sum.
* ``inner``: see :func:`arb_ternary_train.schedules.scheduled_groups`.

A micro-batch whose loss is not finite never reaches the backward pass: it casts no vote and adds no gradient.
"""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from attrs import field, frozen
from torch import Tensor, nn

from arb_ternary.errors import ArbError, ConfigError
from arb_ternary.optim.protocol import StepOutcome, as_outcome
from arb_ternary.protocols.data import Batch, MaskContext, MaskedBatch
from arb_ternary.ternary.models import reset_runtime_state, ternary_modules
from arb_ternary_text.data.loader import BatchLoader
from arb_ternary_text.data.sampler import WindowSampler
from arb_ternary_train.evaluate import masked_loss, timed
from arb_ternary_train.model_calls import call_if_wanted, load_runtime_state, runtime_state
from arb_ternary_train.precision import autocast_for, scaler_for, set_compute_dtype
from arb_ternary_train.schedules import apply_schedule
from arb_ternary_train.seeding import derive_seed, derived_generator, global_rng_state, restore_global_rng

if TYPE_CHECKING:
    from arb_ternary_train.context import RunContext
    from arb_ternary_train.options import LoopOptions

__all__ = ["StepReport", "TrainingLoop", "takes_loss_signal"]


@frozen
class StepReport:
    """One optimizer step.

    Attributes:
        step: steps that the loop has taken, this one included.
        loss: mean loss of the step's micro-batches, nats a token.
        outcome: what the optimizer said.
        rates: ``lr`` of the first float group, ``rate`` of the first ternary group.
        draws: micro-batches in the step.
        tokens: positions that counted in the step's losses.
        grad_norm: norm of all float gradients before clipping, where it was clipped.
    """

    step: int
    loss: float
    outcome: StepOutcome
    rates: Mapping[str, float]
    draws: int
    tokens: int
    grad_norm: float | None

    def metrics(self) -> dict[str, Any]:
        """The numbers for the metrics file: nothing that depends on the clock."""
        outcome = self.outcome
        grad_norm = self.grad_norm if self.grad_norm is not None else outcome.grad_norm
        return {
            "loss": self.loss,
            **self.rates,
            **({} if grad_norm is None else {"grad_norm": grad_norm}),
            "flips": outcome.flips,
            "exponent_moves": outcome.exponent_moves,
            "draws": self.draws,
            **{key: float(value) for key, value in outcome.statistics.items()},
        }


@frozen
class _InFlight:
    """Micro-batches since the last step: how many since the last call of ``optimizer.step``; losses, tokens of all."""

    accumulated: int = 0
    losses: tuple[float, ...] = ()
    tokens: tuple[int, ...] = ()

    def plus(self, loss: float, tokens: int) -> _InFlight:
        return _InFlight(self.accumulated + 1, (*self.losses, loss), (*self.tokens, tokens))

    def attempted(self, *, dropped: bool) -> _InFlight:
        """After a call of ``optimizer.step`` that did not step; it may have dropped what it was called for."""
        kept = len(self.losses) - (self.accumulated if dropped else 0)
        return _InFlight(0, self.losses[:kept], self.tokens[:kept])


@frozen(eq=False)
class _Parts:
    """What a loop works with, built once."""

    model: nn.Module
    forward: Any
    optimizer: torch.optim.Optimizer
    takes_loss_signal: bool
    loader: BatchLoader
    scaler: torch.amp.GradScaler | None
    autocast: Any = field(repr=False)


class TrainingLoop:
    """Trains ``context.model`` with ``options``. Close it when done: it may own threads that read ahead.

    Args:
        context: the run.
        options: how to train.
        key: tells the random choices of this loop from those of other loops of the run.

    Attributes:
        step: optimizer steps taken.
        micro_batches: micro-batches drawn.
        skipped: micro-batches without a finite loss.

    Raises:
        ConfigError: an option that this model, device or optimizer cannot do.
    """

    def __init__(self, context: RunContext, options: LoopOptions, key: str) -> None:
        self.context = context
        self.options = options
        self.key = key
        self.step = 0
        self.micro_batches = 0
        self.skipped = 0
        self._skipped_in_a_row = 0
        self._in_flight = _InFlight()
        self._parts = self._build()
        context.evaluation_shape = (options.batch_size, options.block_size)

    def _build(self) -> _Parts:
        context, options, model = self.context, self.options, self.context.model
        set_compute_dtype(model, options.dtype, context.device)
        call_if_wanted(
            model,
            "set_activation_checkpointing",
            options.activation_checkpointing,
            "activation_checkpointing",
            (options.activation_checkpointing, options.activation_checkpoint_threshold),
        )
        call_if_wanted(
            model, "set_state_preservation", options.preserve_state, "preserve_state", (options.preserve_state,)
        )
        optimizer = context.make_optimizer()
        if options.grad_clip is not None and getattr(optimizer, "defers", False):
            raise ConfigError(
                f"grad_clip: the optimizer {context.config.optimizer.name!r} decides over sums of several gradients, "
                "and clipping would act on a partial sum",
                "Remove grad_clip.",
            )
        stream = context.data.train
        sampler = WindowSampler(
            len(stream),
            options.block_size,
            options.batch_size,
            seed=derive_seed(context.seed, self.key, "order"),
            order=options.order,
            name="the training stream",
        )
        return _Parts(
            model=model,
            forward=torch.compile(model) if options.compile_model else model,
            optimizer=optimizer,
            takes_loss_signal=takes_loss_signal(optimizer),
            loader=BatchLoader(stream, sampler, workers=options.num_workers, pin_memory=options.pin_memory),
            scaler=scaler_for(context.device, options.use_amp, options.amp_dtype),
            autocast=autocast_for(
                context.device, options.use_amp, options.amp_dtype, ternary=context.trains_ternary_modules()
            ),
        )

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer."""
        return self._parts.optimizer

    @property
    def loader(self) -> BatchLoader:
        """Where micro-batches come from; ``loader.sampler.cursor`` may be moved to skip some."""
        return self._parts.loader

    def close(self) -> None:
        """Stop reading ahead."""
        self._parts.loader.close()

    def take_step(self) -> StepReport:
        """Draw micro-batches until the optimizer has stepped."""
        while True:
            if (report := self.advance()) is not None:
                return report

    def advance(self) -> StepReport | None:
        """Draw one micro-batch; the report if the optimizer stepped, None if the step needs more of them.

        Raises:
            ArbError: too many micro-batches in a row had no finite loss.
        """
        started = time.perf_counter()
        rates = self._set_rates()
        batch, masked = self._draw()
        self._parts.model.train()
        with self._parts.autocast():
            logits_BSV = self.predict(batch, masked)
        loss = masked_loss(logits_BSV, masked)
        value, tokens = float(loss.detach()), int(masked.loss_mask.sum())
        self.context.mark_progress()
        report = None
        if math.isfinite(value):
            self._backward(loss)
            self._in_flight = self._in_flight.plus(value, tokens)
            if self._in_flight.accumulated == self.options.gradient_accumulation_steps:
                report = self._try_to_step(rates)
        else:
            reset_runtime_state(self._parts.model)
            self._skip("loss", value)
        self.context.count_training(tokens, time.perf_counter() - started)
        return report

    def mask(self, batch: Batch) -> MaskedBatch:
        """``batch`` masked, for the micro-batch number ``micro_batches``: a pure function of seed, step and number.

        A loop on a model that grows, or with a diffusion time, overrides it.
        """
        context = self.context
        generator = derived_generator(context.seed, self.key, "mask", self.step, self.micro_batches)
        mask_context = MaskContext(step=self.step, seed=context.seed, vocabulary_size=context.vocabulary_size)
        return context.masking.apply(batch, generator, mask_context)

    def predict(self, batch: Batch, masked: MaskedBatch) -> Tensor:
        """Logits ``[B, S, V]`` of a micro-batch in training; a loop that has part of the way computed overrides it.

        Args:
            batch: as it was read, on the host.
            masked: what the masking made of it, on the device.
        """
        logits_BSV: Tensor = self._parts.forward(masked.inputs, **timed(self._parts.model, masked))
        return logits_BSV

    def _set_rates(self) -> dict[str, float]:
        options = self.options
        return apply_schedule(
            self._parts.optimizer,
            options.lr_schedule,
            self.step,
            steps=options.steps,
            warmup=options.warmup_steps,
            lr=options.lr,
            min_lr=options.min_lr,
            min_rate=options.min_rate,
        )

    def _draw(self) -> tuple[Batch, MaskedBatch]:
        """The next micro-batch, as it was read and, masked, on the device."""
        context, sampler = self.context, self._parts.loader.sampler
        if not sampler.continues(sampler.cursor):
            reset_runtime_state(self._parts.model)
        batch = next(self._parts.loader)
        masked = self.mask(batch)
        self.micro_batches += 1
        return batch, masked.to(context.device)

    def _backward(self, loss: Tensor) -> None:
        share = (
            loss / self.options.gradient_accumulation_steps if self.options.gradient_accumulation_steps > 1 else loss
        )
        if self._parts.scaler is not None:
            share = self._parts.scaler.scale(share)
        share.backward()  # type: ignore[no-untyped-call]

    def _try_to_step(self, rates: Mapping[str, float]) -> StepReport | None:
        optimizer, in_flight = self._parts.optimizer, self._in_flight
        recent = in_flight.losses[-in_flight.accumulated :]
        grad_norm = self._clip()
        mean = math.fsum(recent) / len(recent)
        outcome = self._step({"loss_signal": mean} if self._parts.takes_loss_signal else {})
        if outcome.skipped:
            self._skip("gradient", math.nan if outcome.grad_norm is None else outcome.grad_norm)
        if not outcome.stepped:
            self._in_flight = in_flight.attempted(dropped=outcome.skipped)
            return None
        optimizer.zero_grad()
        self.step += 1
        self._skipped_in_a_row = 0
        self._in_flight = _InFlight()
        return StepReport(
            step=self.step,
            loss=math.fsum(in_flight.losses) / len(in_flight.losses),
            outcome=outcome,
            rates=rates,
            draws=len(in_flight.losses),
            tokens=sum(in_flight.tokens),
            grad_norm=grad_norm,
        )

    def _step(self, signals: Mapping[str, float]) -> StepOutcome:
        optimizer, scaler = self._parts.optimizer, self._parts.scaler
        if scaler is None:
            return as_outcome(optimizer.step(**signals), optimizer)  # type: ignore[call-overload]
        before = scaler.get_scale()
        outcome = as_outcome(scaler.step(optimizer, **signals), optimizer)
        scaler.update()
        if scaler.get_scale() < before:  # the scaler found a gradient that is not finite and did not call the optimizer
            optimizer.zero_grad()
            return StepOutcome(stepped=False, skipped=True)
        return outcome

    def _clip(self) -> float | None:
        if self.options.grad_clip is None:
            return None
        if self._parts.scaler is not None:
            self._parts.scaler.unscale_(self._parts.optimizer)
        parameters = [p for p in self._parts.model.parameters() if p.grad is not None]
        return float(nn.utils.clip_grad_norm_(parameters, self.options.grad_clip)) if parameters else None

    def _skip(self, what: str, value: float) -> None:
        self.skipped += 1
        self._skipped_in_a_row += 1
        self.context.record_skip(what, value, self.micro_batches)
        if self._skipped_in_a_row >= self.options.max_skipped:
            raise ArbError(
                f"step {self.context.step + 1}: {self._skipped_in_a_row} micro-batches in a row had no finite {what}; "
                f"the last was {value}",
                "Lower the learning rate, or continue from an earlier checkpoint: --resume PATH.",
            )

    def state_dict(self) -> dict[str, Any]:
        """Everything but the model's own state. The tensors are those in use: copy them to keep them."""
        parts, in_flight = self._parts, self._in_flight
        gradients = {name: p.grad for name, p in parts.model.named_parameters() if p.grad is not None}
        # Between steps the statistics of the gradients are zero, and of no interest.
        modules = ternary_modules(parts.model) if in_flight.losses else []
        statistics = {name: m.stats for name, m in modules}
        magnitudes = {name: m.magnitudes for name, m in modules if m.magnitudes is not None}
        return {
            "step": self.step,
            "micro_batches": self.micro_batches,
            "skipped": self.skipped,
            "skipped_in_a_row": self._skipped_in_a_row,
            "sampler": parts.loader.state_dict(),
            "optimizer": parts.optimizer.state_dict(),
            "scaler": None if parts.scaler is None else parts.scaler.state_dict(),
            "in_flight": {
                "accumulated": in_flight.accumulated,
                "losses": list(in_flight.losses),
                "tokens": list(in_flight.tokens),
                "gradients": gradients,
                "statistics": statistics,
                "magnitudes": magnitudes,
            },
            "runtime": runtime_state(parts.model),
            "rng": global_rng_state(self.context.device),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where ``state`` was taken, on a model that holds the weights of that moment."""
        parts = self._parts
        self.step = state["step"]
        self.micro_batches = state["micro_batches"]
        self.skipped = state["skipped"]
        self._skipped_in_a_row = state["skipped_in_a_row"]
        parts.loader.load_state_dict(state["sampler"])
        parts.optimizer.load_state_dict(state["optimizer"])
        if parts.scaler is not None and state["scaler"] is not None:
            parts.scaler.load_state_dict(state["scaler"])
        in_flight = state["in_flight"]
        self._in_flight = _InFlight(in_flight["accumulated"], tuple(in_flight["losses"]), tuple(in_flight["tokens"]))
        gradients = in_flight["gradients"]
        for name, parameter in parts.model.named_parameters():
            gradient = gradients.get(name)
            parameter.grad = None if gradient is None else gradient.to(parameter.device, parameter.dtype, copy=True)
        for name, module in ternary_modules(parts.model):
            if name in in_flight["statistics"]:
                module.stats.copy_(in_flight["statistics"][name])
            if module.magnitudes is not None and name in in_flight.get("magnitudes", {}):
                module.magnitudes.copy_(in_flight["magnitudes"][name])
        load_runtime_state(parts.model, state["runtime"], self.context.device)
        restore_global_rng(state["rng"], self.context.device)


def takes_loss_signal(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``optimizer.step`` takes ``loss_signal``; one that joins several passes it to their ternary parts."""
    parameters = inspect.signature(optimizer.step).parameters
    if "loss_signal" in parameters:
        return True
    if all(parameter.kind is not inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return False
    ternary = [
        part
        for part in getattr(optimizer, "parts", {}).values()
        if any(group.get("kind") == "ternary" for group in part.param_groups)
    ]
    return bool(ternary) and all(takes_loss_signal(part) for part in ternary)
