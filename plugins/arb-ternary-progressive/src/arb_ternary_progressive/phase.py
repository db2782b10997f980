"""The phase ``progressive``: a model grows stack by stack, each stack trained in turn."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from arb_ternary.errors import ConfigError
from arb_ternary.protocols.data import Batch, MaskedBatch
from arb_ternary.protocols.runs import PhaseResult
from arb_ternary_progressive.activation_cache import ActivationCache
from arb_ternary_progressive.builder import ProgressiveRackBuilder
from arb_ternary_progressive.growth import Stage, release, trunk_stream
from arb_ternary_progressive.history import Progress, StackRecord
from arb_ternary_progressive.masking import GrowthContext
from arb_ternary_progressive.masking_time_step import depth_time
from arb_ternary_progressive.phase_config import ProgressivePhaseConfig
from arb_ternary_progressive.time import depth_of, discrete_time
from arb_ternary_progressive.trunk import TrunkStream
from arb_ternary_text.models.transformer import Transformer
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
    """Trains one stack: masks at its depth and time, and starts from the trunk's hidden states
    where it can.
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
        self._depth = depth_of(stage.index, config.target_stacks)
        self.time_step: int | None = None
        self._time: float | None = None
        if config.time_interpretation == "depth":
            self.time_step, self._time = depth_time(config, stage.index, config.target_stacks)
        super().__init__(context, options, key)

    def mask(self, batch: Batch) -> MaskedBatch:
        """``batch`` masked at the stack's depth and time, or at a time drawn for this
        micro-batch.
        """
        context = self.context
        if self._config.time_interpretation == "input" and self._config.time_sampling == "batch":
            drawn = torch.rand((), generator=self._generator("time"))
            self._time = discrete_time(float(drawn), self._config.num_time_steps)
        mask_context = GrowthContext(
            step=self.step,
            seed=context.seed,
            vocabulary_size=context.vocabulary_size,
            depth=self._depth,
            time=self._time,
        )
        return context.masking.apply(batch, self._generator("mask"), mask_context)

    def predict(self, batch: Batch, masked: MaskedBatch) -> Tensor:
        """Logits ``[B, S, V]``; through the new stack alone where the trunk's hidden states are at
        hand.
        """
        rack = self._stage.rack
        stage = self._stage
        time: Tensor | float | None = None
        if self._config.time_interpretation == "input":
            time = self._time if self._config.time_sampling == "batch" else masked.times
        if self._stream is None:
            options: dict[str, Any] = {"time": time}
        else:
            hidden_BSD = self._stream.hidden(masked.inputs, batch.sample_ids, time)
            options = {"hidden": hidden_BSD, "from_stack": stage.position}
        logits_BSV: Tensor = rack(masked.inputs, **options)
        return logits_BSV

    def _generator(self, what: str) -> torch.Generator:
        return derived_generator(self.context.seed, self.key, what, self.step, self.microbatches)


class ProgressivePhase:
    """Trains the stack that the model begins with, then adds and trains one stack after the other.

    A decoder becomes a rack whose first stack is the decoder's blocks. See ``growth`` for what
    learns when. Who has a rack already, or looks on, overrides :meth:`make_builder`,
    :meth:`open_cache`, :meth:`after_step` or :meth:`after_stack`.
    """

    name = "progressive"

    def __init__(self, config: ProgressivePhaseConfig) -> None:
        self.config = config
        self.records: list[StackRecord] = []
        self._builder: ProgressiveRackBuilder | None = None
        self._loop: _StackLoop | None = None
        self._index = 0
        self._progress = Progress()
        self._counts: dict[str, float] = {}  # of the policies of the stacks before
        self._restored: Mapping[str, Any] | None = None

    # --- the protocol of a phase

    def run(self, context: TrainingContext) -> PhaseResult:
        """Grow to ``target_stacks``, from the start or from where ``load_state_dict`` left off; see
        ``Phase``.
        """
        builder = self._builder = self.make_builder(context)
        context.model = builder.build_rack().to(context.device)
        self._find_first_stack(context, builder)
        with self.open_cache() as cache:
            while self._index < self.config.target_stacks:
                self._train_stack(context, builder, cache)
                self._index += self._together
            release(builder.build_rack())
            context.save_checkpoint()
        metrics = {"stacks": float(len(builder.build_rack().ordered_stacks))}
        if self.records and self.records[-1].last_loss is not None:
            metrics["train_loss"] = self.records[-1].last_loss
        metrics["skipped"] = float(sum(record.skipped for record in self.records))
        metrics.update(self._counts)
        return PhaseResult(steps=sum(record.steps for record in self.records), metrics=metrics)

    def state_dict(self) -> dict[str, Any]:
        """Which stack is trained, or the first of those that are trained together; its loop; and
        the records so far.
        """
        if self._loop is None:
            raise RuntimeError("the progressive phase has not begun")
        return {
            "index": self._index,
            "loop": self._loop.state_dict(),
            "progress": self._progress.state_dict(),
            "records": [record.to_json() for record in self.records],
            "counts": dict(self._counts),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state`` when the phase runs."""
        self._restored = state

    # --- the protocol of a phase that changes the model

    def structure(self) -> dict[str, Any]:
        """The rack that the model has become."""
        if self._builder is None:
            raise RuntimeError("the progressive phase has not begun")
        return {"mask_token": self._builder.build_rack().mask_token, **self._builder.structure()}

    def restore_structure(self, model: nn.Module, structure: Mapping[str, Any]) -> nn.Module:
        """``model`` as a rack of that structure; everything in it can learn."""
        growable = _as_growable(model)
        builder = ProgressiveRackBuilder.from_model(
            growable, self.config, mask_token=int(structure["mask_token"])
        )
        builder.restore(structure)
        rack = builder.build_rack()
        release(rack)
        return rack

    # --- growth

    @property
    def _together(self) -> int:
        """How many stacks are trained at once."""
        return 1 if self.config.enabled else self.config.target_stacks - self._index

    def make_builder(self, context: TrainingContext) -> ProgressiveRackBuilder:
        """The builder of the model's rack."""
        model = _as_growable(context.model)
        reserved = reserved_ids(context.masking, context.vocabulary_size)
        builder = ProgressiveRackBuilder.from_model(
            model, self.config, seed=context.seed, mask_token=next(iter(reserved), None)
        )
        # A rack that was restored has been made without the run at hand.
        builder.build_rack().seed = context.seed
        return builder

    def _find_first_stack(self, context: TrainingContext, builder: ProgressiveRackBuilder) -> None:
        """Set the index of the stack that is trained first; a restored phase goes on with the one
        that it was at.
        """
        if self._restored is not None:
            self._index = self._restored["index"]
            self.records = [StackRecord.from_json(record) for record in self._restored["records"]]
            self._counts = dict(self._restored.get("counts", {}))
            if self.records and self.records[-1].index >= self._index:
                self._index = self.records[-1].index + 1
                self._restored = None
            return
        stacks = len(builder.build_rack().ordered_stacks)
        self._index = stacks - int(self.config.train_first)
        if self._index >= self.config.target_stacks:
            raise ConfigError(
                f"phases[{context.phase_index}].target_stacks: the model has {stacks} stacks "
                f"already, so that there is nothing to train up to {self.config.target_stacks}",
                "Ask for more stacks.",
            )

    def open_cache(self) -> AbstractContextManager[ActivationCache | None]:
        """Where the trunk's hidden states are kept while the phase runs; None = they are not
        kept.
        """
        config = self.config
        if not (config.enabled and config.cache_activations):
            return nullcontext()
        return ActivationCache(config.cache_bytes, config.cache_folder, config.cache_dtype)

    def _train_stack(
        self,
        context: TrainingContext,
        builder: ProgressiveRackBuilder,
        cache: ActivationCache | None,
    ) -> None:
        """Add the stack (or all stacks, where they are trained together), if it is not there yet,
        and train it.
        """
        config = self.config
        index = self._index + self._together - 1
        rack = builder.build_rack()
        while len(rack.ordered_stacks) <= index:
            builder.add_stack()
            context.model = rack.to(context.device)
            context.mark_progress()
        stage = Stage.enter(builder, config.trunk_strategy) if config.enabled else Stage.whole(rack)
        if cache is not None and index and stage.streams:
            context.note(f"stack {index}: the activation cache is not used: {stage.streams}")
        stream = trunk_stream(stage, cache, config.cache_dtype)
        options = self._options(context)
        key = f"phase {context.phase_index} stack {index}"
        loop = self._loop = _StackLoop(
            context, options, key, stage=stage, stream=stream, config=config
        )
        started = time.perf_counter()
        before = None if cache is None else cache.stats
        try:
            self._progress = Progress()
            if self._restored is not None:
                loop.load_state_dict(self._restored["loop"])
                self._progress = Progress.from_state(self._restored["progress"])
                self._restored = None
                context.finish_evaluation()
            context.logbook.reporter.start(f"{self.name}, stack {index}", options.steps, loop.step)
            while loop.step < options.steps:
                report = loop.train_microbatch()
                if report is not None:
                    self._progress.add(report.loss, report.tokens)
                    self.after_step(context, stage, report)
                    context.checkpoint_if_due()
                context.stop_if_requested()
        finally:
            loop.close()
        context.logbook.reporter.stop()
        add_counts(self._counts, loop.policy)
        self.records.append(
            stage.record(self._progress, time_step=loop.time_step, skipped=loop.skipped)
        )
        summary = (
            f"stack {index}: {self._progress.steps} steps in {time.perf_counter() - started:.1f} s"
        )
        if cache is not None and before is not None and stream is not None:
            stats = cache.stats
            asked = stats.hits + stats.misses - before.hits - before.misses
            summary += (
                f"; cache: {stats.hits - before.hits:,} hits of {asked:,}, {stats.samples:,} "
                f"samples in {stats.nbytes:,} bytes, {stats.evictions:,} evicted"
            )
        self.after_stack(context, self.records[-1], summary)

    def after_step(self, context: TrainingContext, stage: Stage, report: StepReport) -> None:
        """Write a step down, then evaluate where that is due."""
        assert self._loop is not None
        log_and_evaluate(
            context,
            report,
            self.config,
            steps=self._loop.options.steps,
            ends_phase=stage.index == self.config.target_stacks - 1,
            more={"stack": stage.index},
        )

    def after_stack(self, context: TrainingContext, record: StackRecord, summary: str) -> None:
        """Write down what became of a stack; ``summary`` is for who watches."""
        context.record("stack", record.to_json())
        context.note(summary)

    def _options(self, context: TrainingContext) -> LoopOptions:
        config = self.config
        if config.steps_per_stack is not None:
            steps = config.steps_per_stack * self._together
        else:
            windows = context.data.samples_per_epoch(config.block_size)
            step_samples = config.batch_size * config.gradient_accumulation_steps
            steps = math.ceil(
                (config.epochs_per_stack or 1) * windows * self._together / step_samples
            )
        try:
            return config.loop_options(steps)
        except ValueError as error:
            raise ConfigError(f"phases[{context.phase_index}]: {error}") from error


def _as_growable(model: nn.Module) -> Transformer:
    """``model``, when it has an embedding, blocks, final norm and head to grow.

    Raises:
        ConfigError: it is another kind of model.
    """
    if not (isinstance(model, Transformer) and model.grows):
        raise ConfigError(
            "model: the phase progressive grows models that are a decoder's blocks between an "
            f"embedding and a head; a {type(model).__name__} is not",
            "Use model: {name: decoder}.",
        )
    return model


def build(config: ProgressivePhaseConfig) -> ProgressivePhase:
    """The factory that the ``progressive`` phase registers."""
    return ProgressivePhase(config)
