"""The phase ``blockwise``: block after block of the student learns the teacher's outputs."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch
from attrs import asdict, evolve
from torch import nn

from arb_ternary.config.options import LARGEST_INT64
from arb_ternary.protocols.runs import PhaseResult
from arb_ternary_text.models.decoder import Decoder
from arb_ternary_train.activation_cache import ActivationCache
from arb_ternary_train.policy import add_counts
from arb_ternary_train.progress import format_duration
from arb_ternary_train.standard import log_and_evaluate
from arb_ternary_upcycle.block_loop import BlockLoop
from arb_ternary_upcycle.block_probe import BlockProbe
from arb_ternary_upcycle.calibration import held_out_batches
from arb_ternary_upcycle.learning import only_learning, parts_of_blocks, refuse_idle_patterns
from arb_ternary_upcycle.stages import find_stage
from arb_ternary_upcycle.streams import Streams
from arb_ternary_upcycle.student import student_of
from arb_ternary_upcycle.teacher_module import Teacher, as_student
from arb_ternary_upcycle.training_options import BlockwiseConfig
from arb_ternary_upcycle.trend import Autotune, Convergence, Trend

if TYPE_CHECKING:
    from arb_ternary_train.context import TrainingContext
    from arb_ternary_train.step import StepReport

#: Losses of a block whose mean is reported as its first.
_FIRST: Final = 10


class BlockwisePhase:
    """Trains one block after the other; each sees the outputs of the trained ones before it."""

    name = "blockwise"

    def __init__(self, config: BlockwiseConfig) -> None:
        self.config = config
        self._block = 0
        self._loop: BlockLoop | None = None
        self._convergence = Convergence(config.convergence_target, config.convergence_patience)
        self._first: list[float] = []
        self._records: list[dict[str, Any]] = []
        self._counts: dict[str, float] = {}  # of the policies of earlier blocks
        self._restored: Mapping[str, Any] | None = None

    def check_model(self, model: nn.Module, where: str) -> None:
        """See ``arb_ternary_train.capabilities.check_model``."""
        student = student_of(model)
        parts = parts_of_blocks(student, self.config.distill_target)
        refuse_idle_patterns(student, parts, self.config, where)

    def run(self, context: TrainingContext) -> PhaseResult:
        """Train all blocks, from the first or from where a resumed phase was; see ``Phase``."""
        model = find_stage(context, self.config.teacher, ("teacher", "prepared"))
        student = as_student(context.model, model)
        # An earlier phase may have changed the model since it was checked.
        self.check_model(student, f"phases[{context.phase_index}]")
        config = self.config
        teacher = Teacher(model, config.teacher_memory, context.device, config.teacher_dtype)
        probe = self._make_probe(context, student, teacher) if config.probe_tokens else None
        with self._streams(context, student, teacher) as streams:
            while self._block < len(student.blocks):
                self._train_block(context, student, streams, probe)
            context.save_checkpoint()
        losses = [record["l1"] for record in self._records]
        metrics = {
            "l1": sum(losses) / len(losses),
            "train_loss": losses[-1],
            "skipped": float(sum(record["skipped"] for record in self._records)),
            **self._counts,
        }
        return PhaseResult(steps=sum(record["steps"] for record in self._records), metrics=metrics)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the block in training, and the records of earlier blocks."""
        loop = self._loop
        autotune = None if loop is None else loop.autotune
        return {
            "block": self._block,
            "loop": None if loop is None else loop.state_dict(),
            "trend": asdict(self._convergence.trend),
            "first": list(self._first),
            "autotune": None if autotune is None else autotune.state_dict(),
            "records": [dict(record) for record in self._records],
            "counts": dict(self._counts),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state`` when the phase runs."""
        self._block = state["block"]
        self._records = [dict(record) for record in state["records"]]
        self._counts = dict(state.get("counts", {}))
        self._restored = None if state["loop"] is None else state

    @contextmanager
    def _streams(
        self, context: TrainingContext, student: Decoder, teacher: Teacher
    ) -> Iterator[Streams]:
        """Yield the residual streams; their cache is deleted once the phase is done."""
        config = self.config
        if not config.cache_teacher_outputs:
            yield Streams(student, teacher, config.distill_target)
            return
        folder = context.directory / "cache" / f"phase-{context.phase_index}"
        own = folder / f"rank-{context.world.rank}"
        computed_by = f"{teacher.model.digest} {config.teacher_dtype} {context.device}"
        with ActivationCache(config.cache_memory, own, note=context.note) as cache:
            yield Streams(student, teacher, config.distill_target, cache, computed_by)
        context.world.barrier()
        if context.world.is_main:
            shutil.rmtree(folder, ignore_errors=True)

    def _make_probe(
        self, context: TrainingContext, student: Decoder, teacher: Teacher
    ) -> BlockProbe:
        config = self.config
        batches = held_out_batches(
            context, tokens=config.probe_tokens, block_size=config.block_size
        )
        cache = ActivationCache(LARGEST_INT64)
        streams = Streams(student, teacher, config.distill_target, cache)
        return BlockProbe(streams, torch.cat([batch.inputs for batch in batches]))

    def _train_block(
        self,
        context: TrainingContext,
        student: Decoder,
        streams: Streams,
        probe: BlockProbe | None,
    ) -> None:
        number = self._block
        blocks = len(student.blocks)
        reporter = context.logbook.reporter
        options = evolve(self.config, steps=self.config.steps_of_block)
        streams.begin(number)
        if probe is not None:
            probe.begin(number)
        self._convergence.trend = Trend()
        self._first = []
        started = time.perf_counter()
        steps_before = 0
        part = student.get_submodule(parts_of_blocks(student, options.distill_target)[number])
        with only_learning(student, part):
            # All blocks have the same key: they see the same samples in the same order, so that
            # outputs can be cached.
            key = f"phase {context.phase_index}"
            loop = self._loop = BlockLoop(
                context,
                options,
                key,
                block=number,
                part=part,
                streams=streams,
                probe=probe,
            )
            try:
                if self._restored is not None:
                    self._restore(loop, self._restored)
                    self._restored = None
                    steps_before = loop.step
                    context.finish_evaluation()
                title = f"{self.name}, block {number + 1} of {blocks}"
                reporter.start(title, options.steps, loop.step)
                # A policy may have run ahead of the reported steps: all of them are reported.
                while context.reporting_behind or (
                    loop.step < options.steps and not self._convergence.done
                ):
                    report = loop.train_microbatch()
                    if report is not None:
                        self._after_step(context, loop, report, ends_phase=number == blocks - 1)
                        context.checkpoint_if_due()
                    context.stop_if_requested()
                loop.finish(context.step)
            finally:
                loop.close()
        reporter.stop()
        seconds = time.perf_counter() - started
        self._finish_block(context, loop, blocks, seconds, loop.step - steps_before)

    def _restore(self, loop: BlockLoop, state: Mapping[str, Any]) -> None:
        loop.load_state_dict(state["loop"])
        self._convergence.trend = Trend(**state["trend"])
        self._first = list(state["first"])
        if loop.autotune is not None and state["autotune"] is not None:
            loop.autotune.load_state_dict(state["autotune"])

    def _after_step(
        self, context: TrainingContext, loop: BlockLoop, report: StepReport, *, ends_phase: bool
    ) -> None:
        """Judge the loss of a step, and record the step."""
        self._convergence.trend.observe(report.loss)
        if len(self._first) < _FIRST:
            self._first.append(report.loss)
        if loop.autotune is not None:
            self._autotune(context, loop.step, loop.autotune, report.loss)
        steps = report.step if self._convergence.done else loop.options.steps
        more = {"block": self._block}
        log_and_evaluate(
            context, report, self.config, steps=steps, ends_phase=ends_phase, more=more
        )

    def _autotune(
        self, context: TrainingContext, step: int, autotune: Autotune, loss: float
    ) -> None:
        """Let autotuning judge a loss, and report what it decides."""
        config = self.config
        decision = autotune.observe(loss)
        where = f"block {self._block + 1} step {step}: autotune"
        if decision is not None:
            active = config.blockwise_autotune_mode == "active"
            values = {
                "step": context.step + 1,
                "block": self._block,
                "cause": decision.cause,
                "factor": decision.factor,
                "applied": active,
            }
            context.record("autotune", values)
            what = "is at the floor"
            if decision.lowers:
                verb = "lowers" if active else "would lower"
                what = f"{verb} the rates to {decision.factor:g} of the schedule's"
            context.note(f"{where}: a {decision.cause}: {what}")
        elif step % config.blockwise_autotune_log_every == 0:
            trend = autotune.trend
            context.note(
                f"{where}: mean {trend.mean:.4g}, lowest {trend.best:.4g}, {autotune.waited} steps "
                f"ago, rates at {autotune.factor:g} of the schedule's"
            )

    def _finish_block(
        self, context: TrainingContext, loop: BlockLoop, blocks: int, seconds: float, steps: int
    ) -> None:
        """Record a block; it has taken ``steps`` steps in ``seconds`` since the run was resumed."""
        record = {
            "block": self._block,
            "steps": loop.step,
            "l1_first": sum(self._first) / max(1, len(self._first)),
            "l1": self._convergence.trend.mean,
            "reason": self._convergence.reason,
            "skipped": loop.skipped,
        }
        self._records.append(record)
        add_counts(self._counts, loop.policy)
        context.record("block", record)
        text = (
            f"block {self._block + 1} of {blocks}: {loop.step} steps, L1 {record['l1_first']:.4g} "
            f"to {record['l1']:.4g} ({record['reason']})"
        )
        left = blocks - self._block - 1
        if left and steps:
            text += f"; {left} blocks left, about {format_duration(seconds * left)}"
        context.note(text)
        self._block += 1
        self._loop = None
        context.mark_progress()
