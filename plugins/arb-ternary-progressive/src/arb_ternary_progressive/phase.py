"""The phase ``progressive``: a model grows stack by stack, and each stack is trained in turn."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import attrs
import torch
from torch import Tensor, nn

from arb_ternary.errors import ConfigError
from arb_ternary.protocols.data import Batch, MaskedBatch
from arb_ternary.protocols.runs import PhaseResult
from arb_ternary_progressive.builder import ProgressiveRackBuilder
from arb_ternary_progressive.config import ProgressivePhaseConfig
from arb_ternary_progressive.growth import Stage, release
from arb_ternary_progressive.history import Progress, StackRecord
from arb_ternary_progressive.masking import growth_context
from arb_ternary_progressive.time import discrete_time
from arb_ternary_progressive.trunk import TrunkStream
from arb_ternary_text.models.transformer import Transformer
from arb_ternary_train.activation_cache import ActivationCache
from arb_ternary_train.capabilities import reserved_ids
from arb_ternary_train.loop import TrainingLoop
from arb_ternary_train.policy import add_counts
from arb_ternary_train.seeding import derived_generator
from arb_ternary_train.standard import log_and_evaluate

if TYPE_CHECKING:
    from arb_ternary_train.context import TrainingContext
    from arb_ternary_train.options import LoopOptions
    from arb_ternary_train.step import StepReport


class _StackLoop(TrainingLoop):
    """Trains one stack: masks at its depth and time, and starts from cached hidden states.

    Attributes:
        time_step: the time step of the stack; None if time is an input.
    """

    def __init__(
        self,
        context: TrainingContext,
        options: LoopOptions,
        key: str,
        *,
        stage: Stage,
        stream: TrunkStream | None,
        config: ProgressivePhaseConfig,
    ) -> None:
        self._stage = stage
        self._stream = stream
        self._config = config
        self.time_step: int | None = None
        # Times drawn for micro-batches; all of a step are masked before the first is trained on.
        self._times: WeakKeyDictionary[Batch, float] = WeakKeyDictionary()
        if config.time_interpretation == "depth":
            self.time_step = config.time_step(stage.index, config.target_stacks)
        super().__init__(context, options, key)

    def mask(self, batch: Batch) -> MaskedBatch:
        """Mask ``batch`` at the stack's depth and time, or at a time drawn for this micro-batch."""
        context = self.context
        config = self._config
        drawn: float | None = None
        if config.time_interpretation == "input" and config.time_sampling == "batch":
            uniform = float(torch.rand((), generator=self._generator("time")))
            drawn = self._times[batch] = discrete_time(uniform, config.num_time_steps)
        mask_context = growth_context(
            config,
            self._stage.index,
            config.target_stacks,
            context.seed,
            step=self.step,
            vocabulary_size=context.vocabulary_size,
            drawn=drawn,
        )
        return context.masking.apply(batch, self._generator("mask"), mask_context)

    def predict(self, batch: Batch, masked: MaskedBatch) -> Tensor:
        """Return logits ``[B, S, V]``, through the new stack alone if the trunk's are cached."""
        time: Tensor | float | None = None
        if self._config.time_interpretation == "input":
            time = masked.times if self._config.draws_sample_times else self._times[batch]
        options: dict[str, Any] = {"time": time}
        if self._stream is not None:
            hidden_BSD = self._stream.hidden(masked.inputs, batch.sample_ids, time)
            options = {"hidden": hidden_BSD, "from_stack": self._stage.position}
        logits_BSV: Tensor = self._stage.rack(masked.inputs, **options)
        return logits_BSV

    def _generator(self, purpose: str) -> torch.Generator:
        return derived_generator(self.context.seed, self.key, purpose, self.step, self.microbatches)


class ProgressivePhase:
    """Trains the stack that the model begins with, then adds and trains one stack after another.

    A decoder becomes a rack whose first stack is the decoder's blocks. See ``growth`` for what
    learns when. A subclass that has a rack already, or observes the training, overrides
    :meth:`make_builder`, :meth:`open_cache`, :meth:`after_step` or :meth:`after_stack`.
    """

    name = "progressive"

    def __init__(self, config: ProgressivePhaseConfig) -> None:
        self.config = config
        self.records: list[StackRecord] = []
        self._builder: ProgressiveRackBuilder | None = None
        self._loop: _StackLoop | None = None
        self._index = 0
        self._progress = Progress()
        # Of the policies of the stacks before.
        self._counts: dict[str, float] = {}
        self._restored: Mapping[str, Any] | None = None

    # --- the protocol of a phase

    def run(self, context: TrainingContext) -> PhaseResult:
        """Grow to ``target_stacks``, from the start or from the restored state; see ``Phase``."""
        builder = self._builder = self.make_builder(context)
        rack = builder.build_rack()
        context.model = rack.to(context.device)
        self._set_first_index(context, len(rack.ordered_stacks))
        with self.open_cache(context) as cache:
            while self._index < self.config.target_stacks:
                self._train_stack(context, builder, cache)
                self._index += self._trained_together
            release(rack)
            context.save_checkpoint()

        metrics = {"stacks": float(len(rack.ordered_stacks))}
        if self.records and self.records[-1].last_loss is not None:
            metrics["train_loss"] = self.records[-1].last_loss
        metrics["skipped"] = float(sum(record.skipped for record in self.records))
        metrics.update(self._counts)
        return PhaseResult(steps=sum(record.steps for record in self.records), metrics=metrics)

    def state_dict(self) -> dict[str, Any]:
        """Return the index of the stack in training, the state of its loop and the records so far.

        If several stacks are trained together, the index is that of the first of them.
        """
        if self._loop is None:
            raise RuntimeError("the progressive phase has not begun")
        return {
            "index": self._index,
            "loop": self._loop.state_dict(),
            "progress": attrs.asdict(self._progress),
            "records": [record.to_json() for record in self.records],
            "counts": dict(self._counts),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state`` when the phase runs."""
        self._restored = state

    # --- the protocol of a phase that changes the model

    def structure(self) -> dict[str, Any]:
        """Return the structure of the rack that the model has become."""
        if self._builder is None:
            raise RuntimeError("the progressive phase has not begun")
        rack = self._builder.build_rack()
        return {"mask_token": rack.mask_token, **rack.structure()}

    def restore_structure(self, model: nn.Module, structure: Mapping[str, Any]) -> nn.Module:
        """Return ``model`` as a rack of that structure, in which everything can learn."""
        builder = ProgressiveRackBuilder.from_model(
            as_growable(model), self.config, mask_token=int(structure["mask_token"])
        )
        rack = builder.build_rack()
        rack.restore_structure(structure)
        release(rack)
        return rack

    # --- growth

    @property
    def _trained_together(self) -> int:
        """The number of stacks that are trained at once."""
        return 1 if self.config.enabled else self.config.target_stacks - self._index

    def make_builder(self, context: TrainingContext) -> ProgressiveRackBuilder:
        """Return the builder of the model's rack."""
        reserved = reserved_ids(context.masking, context.vocabulary_size)
        builder = ProgressiveRackBuilder.from_model(
            as_growable(context.model),
            self.config,
            seed=context.seed,
            mask_token=next(iter(reserved), None),
        )
        # A restored rack was made without knowing the run's seed.
        builder.build_rack().seed = context.seed
        return builder

    def _set_first_index(self, context: TrainingContext, stacks: int) -> None:
        """Set the index of the stack to train first; a restored phase continues with its own."""
        if self._restored is not None:
            self._index = self._restored["index"]
            self.records = [StackRecord(**record) for record in self._restored["records"]]
            self._counts = dict(self._restored.get("counts", {}))
            if self.records and self.records[-1].index >= self._index:
                self._index = self.records[-1].index + 1
                self._restored = None
            return
        self._index = stacks - int(self.config.train_first)
        if self._index >= self.config.target_stacks:
            raise ConfigError(
                f"phases[{context.phase_index}].target_stacks: the model has {stacks} stacks "
                f"already, so there is nothing to train up to {self.config.target_stacks}",
                "Ask for more stacks.",
            )

    def open_cache(
        self, context: TrainingContext
    ) -> AbstractContextManager[ActivationCache | None]:
        """Return the cache of the trunk's hidden states; None if they are not cached."""
        config = self.config
        if not (config.enabled and config.cache_activations):
            return nullcontext()
        if config.cache_folder is None:
            return ActivationCache(config.cache_bytes, dtype=config.cache_dtype)
        return ActivationCache(
            0, Path(config.cache_folder), config.cache_bytes, config.cache_dtype, context.note
        )

    def _train_stack(
        self,
        context: TrainingContext,
        builder: ProgressiveRackBuilder,
        cache: ActivationCache | None,
    ) -> None:
        """Add and train the next stack, or all stacks if they are trained together."""
        config = self.config
        index = self._index + self._trained_together - 1
        rack = builder.build_rack()
        while len(rack.ordered_stacks) <= index:
            builder.add_stack()
            context.model = rack.to(context.device)
            context.mark_progress()

        stage = Stage.enter(builder, config.trunk_strategy) if config.enabled else Stage.whole(rack)
        if cache is not None and index and stage.uncacheable:
            context.note(f"stack {index}: the activation cache is not used: {stage.uncacheable}")
        stream = stage.trunk_stream(cache, config.cache_dtype)
        loop = self._loop = _StackLoop(
            context,
            self._loop_options(context),
            f"phase {context.phase_index} stack {index}",
            stage=stage,
            stream=stream,
            config=config,
        )

        started = time.perf_counter()
        hits_before = 0 if cache is None else cache.hits
        misses_before = 0 if cache is None else cache.misses
        try:
            self._run_loop(context, loop, stage)
        finally:
            loop.close()
        context.logbook.reporter.stop()
        add_counts(self._counts, loop.policy)
        record = stage.record(self._progress, time_step=loop.time_step, skipped=loop.skipped)
        self.records.append(record)

        seconds = time.perf_counter() - started
        summary = f"stack {index}: {self._progress.steps} steps in {seconds:.1f} s"
        if cache is not None and stream is not None:
            hits = cache.hits - hits_before
            asked = hits + cache.misses - misses_before
            summary += (
                f"; cache: {hits:,} hits of {asked:,}, {len(cache):,} samples in "
                f"{cache.nbytes:,} bytes, {cache.evictions:,} evicted"
            )
        self.after_stack(context, record, summary)

    def _run_loop(self, context: TrainingContext, loop: _StackLoop, stage: Stage) -> None:
        """Train one stack, from the start or from the restored state."""
        steps = loop.options.steps
        self._progress = Progress()
        if self._restored is not None:
            loop.load_state_dict(self._restored["loop"])
            self._progress = Progress(**self._restored["progress"])
            self._restored = None
            context.finish_evaluation()
        context.logbook.reporter.start(f"{self.name}, stack {stage.index}", steps, loop.step)
        while loop.step < steps:
            report = loop.train_microbatch()
            if report is not None:
                self._progress.add(report.loss, report.tokens)
                self.after_step(context, stage, report, steps)
                context.checkpoint_if_due()
            context.stop_if_requested()

    def after_step(
        self, context: TrainingContext, stage: Stage, report: StepReport, steps: int
    ) -> None:
        """Record a step, then evaluate if an evaluation is due.

        Args:
            context: the run.
            stage: the stack in training.
            report: report of the step.
            steps: steps that the stack is trained for.
        """
        log_and_evaluate(
            context,
            report,
            self.config,
            steps=steps,
            ends_phase=stage.index == self.config.target_stacks - 1,
            more={"stack": stage.index},
        )

    def after_stack(self, context: TrainingContext, record: StackRecord, summary: str) -> None:
        """Write the record of a stack; ``summary`` is for the screen."""
        context.record("stack", record.to_json())
        context.note(summary)

    def _loop_options(self, context: TrainingContext) -> LoopOptions:
        """Return the options of the next loop, with its number of steps."""
        config = self.config
        steps = config.steps_per_stack
        if steps is not None:
            steps *= self._trained_together
        else:
            samples = context.data.samples_per_epoch(config.block_size) * self._trained_together
            step_samples = config.batch_size * config.gradient_accumulation_steps
            steps = math.ceil((config.epochs_per_stack or 1) * samples / step_samples)
        try:
            return config.loop_options(steps)
        except ValueError as error:
            raise ConfigError(f"phases[{context.phase_index}]: {error}") from error


def as_growable(model: nn.Module) -> Transformer:
    """Return ``model`` if it has an embedding, blocks, a final norm and a head to grow.

    Raises:
        ConfigError: it is another kind of model.
    """
    if isinstance(model, Transformer) and model.grows:
        return model
    raise ConfigError(
        "model: the phase progressive grows models that are a decoder's blocks between an "
        f"embedding and a head; a {type(model).__name__} is not",
        "Use model: {name: decoder}.",
    )
