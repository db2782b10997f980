"""The phase ``blockwise``: each block of the student in turn learns to give what the teacher's
block gives.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from attrs import asdict, evolve
from torch import nn

from arb_ternary.protocols.runs import PhaseResult
from arb_ternary_text.models.decoder import Decoder
from arb_ternary_train.policy import add_counts
from arb_ternary_train.progress import format_duration
from arb_ternary_train.standard import log_and_evaluate
from arb_ternary_upcycle.block_loop import BlockLoop
from arb_ternary_upcycle.float_model import FloatModel
from arb_ternary_upcycle.learning import only_learning, parts_of_blocks, refuse_idle_patterns
from arb_ternary_upcycle.output_cache import OutputCache
from arb_ternary_upcycle.stages import find_stage
from arb_ternary_upcycle.streams import Streams
from arb_ternary_upcycle.student import student_of
from arb_ternary_upcycle.teacher_module import Teacher, as_student
from arb_ternary_upcycle.training_options import BlockwiseConfig
from arb_ternary_upcycle.trend import Convergence, Decision, Trend

if TYPE_CHECKING:
    from arb_ternary_train.context import TrainingContext
    from arb_ternary_train.step_report import StepReport

#: Where a block begins to be compared with the end: the mean of so many first losses.
_FIRST: Final = 10


class BlockwisePhase:
    """Trains one block after the other, the first one first; each sees what the trained ones before
    it give.
    """

    name = "blockwise"

    def __init__(self, config: BlockwiseConfig) -> None:
        self.config = config
        self._block = 0
        self._loop: BlockLoop | None = None
        self._convergence = Convergence(config.convergence_target, config.convergence_patience)
        self._first: list[float] = []
        self._records: list[dict[str, Any]] = []
        self._counts: dict[str, float] = {}  # of the policies of the blocks before
        self._restored: Mapping[str, Any] | None = None

    def check_model(self, model: nn.Module, where: str) -> None:
        """See ``arb_ternary_train.protocols.ChecksModel``."""
        student = student_of(model)
        refuse_idle_patterns(
            student, parts_of_blocks(student, self.config.distill_target), self.config, where
        )

    def run(self, context: TrainingContext) -> PhaseResult:
        """Train all blocks, from the first or from where ``load_state_dict`` left off; see
        ``Phase``.
        """
        model = find_stage(context, self.config.teacher, ("teacher", "prepared"))
        student = as_student(context.model, model)
        # A phase before this one may have changed the model since it was asked.
        self.check_model(student, f"phases[{context.phase_index}]")
        with self._streams(context, student, model) as streams:
            while self._block < len(student.blocks):
                self._train_block(context, student, streams)
            context.save_checkpoint()
        last = [record["l1"] for record in self._records]
        metrics = {"l1": sum(last) / len(last), "train_loss": last[-1]}
        metrics["skipped"] = float(sum(record["skipped"] for record in self._records))
        metrics.update(self._counts)
        return PhaseResult(steps=sum(record["steps"] for record in self._records), metrics=metrics)

    def state_dict(self) -> dict[str, Any]:
        """Which block is trained, its loop, what its losses say, and what became of those
        before.
        """
        loop = self._loop
        return {
            "block": self._block,
            "loop": None if loop is None else loop.state_dict(),
            "trend": asdict(self._convergence.trend),
            "first": list(self._first),
            "autotune": None
            if loop is None or loop.autotune is None
            else loop.autotune.state_dict(),
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
        self, context: TrainingContext, student: Decoder, model: FloatModel
    ) -> Iterator[Streams]:
        """The residual streams, cached in the run's directory while the phase runs."""
        config = self.config
        teacher = Teacher(model, config.teacher_memory, context.device, config.teacher_dtype)
        if not config.cache_teacher_outputs:
            yield Streams(student, teacher, config.distill_target, None)
            return
        rank = context.world.rank
        caches = context.directory / "cache"
        # Each rank has a cache of its own, the first one that of a run in one process.
        folder = caches / (f"phase-{context.phase_index}" + (f"-rank-{rank}" if rank else ""))
        cache = OutputCache(
            folder,
            config.cache_memory,
            f"{model.digest} {config.teacher_dtype} {context.device}",
            context.note,
        )
        try:
            yield Streams(student, teacher, config.distill_target, cache)
        except BaseException:
            cache.close()
            raise
        cache.remove()
        context.world.barrier("the end of the cached outputs")
        if context.world.is_main:  # those of a run that had more ranks before it was stopped
            for left in caches.glob(f"phase-{context.phase_index}-rank-*"):
                shutil.rmtree(left, ignore_errors=True)

    def _train_block(self, context: TrainingContext, student: Decoder, streams: Streams) -> None:
        number = self._block
        blocks = len(student.blocks)
        reporter = context.logbook.reporter
        options = evolve(self.config, steps=self.config.steps_of_block)
        streams.begin(number)
        self._convergence.trend = Trend()
        self._first = []
        started = time.perf_counter()
        steps_before = 0
        part = parts_of_blocks(student, options.distill_target)[number]
        with only_learning(student, student.get_submodule(part)):
            # The key is that of all blocks: they see the same samples in the same order, which can
            # then be cached.
            key = f"phase {context.phase_index}"
            loop = self._loop = BlockLoop(
                context, options, key, student=student, block=number, streams=streams
            )
            try:
                if self._restored is not None:
                    self._restore(loop, self._restored)
                    self._restored = None
                    steps_before = loop.step
                    context.finish_evaluation()
                reporter.start(
                    f"{self.name}, block {number + 1} of {blocks}", options.steps, loop.step
                )
                # Steps that a policy has taken ahead are told to the last.
                while (loop.step < options.steps and not self._convergence.done) or context.held:
                    report = loop.train_microbatch()
                    if report is not None:
                        self._after_step(context, loop, report, ends_phase=number == blocks - 1)
                        context.checkpoint_if_due()
                    context.stop_if_requested()
            finally:
                loop.close()
        reporter.stop()
        self._finish_block(
            context, loop, blocks, time.perf_counter() - started, loop.step - steps_before
        )

    def _restore(self, loop: BlockLoop, state: Mapping[str, Any]) -> None:
        loop.load_state_dict(state["loop"])
        self._convergence.trend = Trend(**state["trend"])
        self._first = list(state["first"])
        if loop.autotune is not None and state["autotune"] is not None:
            loop.autotune.load_state_dict(state["autotune"])

    def _after_step(
        self, context: TrainingContext, loop: BlockLoop, report: StepReport, *, ends_phase: bool
    ) -> None:
        """Judge a step, and write it down."""
        self._convergence.trend.observe(report.loss)
        if len(self._first) < _FIRST:
            self._first.append(report.loss)
        if loop.autotune is not None:
            self._report_autotune(context, loop, loop.autotune.observe(report.loss))
        steps = report.step if self._convergence.done else loop.options.steps
        more = {"block": self._block}
        log_and_evaluate(
            context, report, self.config, steps=steps, ends_phase=ends_phase, more=more
        )

    def _report_autotune(
        self, context: TrainingContext, loop: BlockLoop, decision: Decision | None
    ) -> None:
        config = self.config
        autotune = loop.autotune
        assert autotune is not None
        where = f"block {self._block + 1} step {loop.step}: autotune"
        if decision is not None:
            active = config.blockwise_autotune_mode == "active"
            values = {
                "block": self._block,
                "cause": decision.cause,
                "factor": decision.factor,
                "applied": active,
            }
            context.record("autotune", {"step": context.step + 1, **values})
            verb = "lowers" if active else "would lower"
            what = (
                f"{verb} the rates to {decision.factor:g} of the schedule's"
                if decision.lowers
                else "is at the floor"
            )
            context.note(f"{where}: a {decision.cause}: {what}")
        elif loop.step % config.blockwise_autotune_log_every == 0:
            trend = autotune.trend
            context.note(
                f"{where}: mean {trend.mean:.4g}, lowest {trend.best:.4g}, {autotune.waited} steps "
                f"ago, rates at {autotune.factor:g} of the schedule's"
            )

    def _finish_block(
        self, context: TrainingContext, loop: BlockLoop, blocks: int, seconds: float, steps: int
    ) -> None:
        trend = self._convergence.trend
        record = {
            "block": self._block,
            "steps": loop.step,
            "l1_first": sum(self._first) / max(1, len(self._first)),
            "l1": trend.mean,
            "reason": self._convergence.reason,
            "skipped": loop.skipped,
        }
        self._records.append(record)
        add_counts(self._counts, loop.policy)
        context.record("block", record)
        left = blocks - self._block - 1
        text = (
            f"block {self._block + 1} of {blocks}: {loop.step} steps, L1 {record['l1_first']:.4g} "
            f"to {record['l1']:.4g} ({record['reason']})"
        )
        if left and steps:
            text += f"; {left} blocks left, {format_duration(seconds * left)} as the last one went"
        context.note(text)
        self._block = self._block + 1
        self._loop = None
        context.mark_progress()


def build(config: BlockwiseConfig) -> BlockwisePhase:
    """The factory that the ``blockwise`` phase registers."""
    return BlockwisePhase(config)
