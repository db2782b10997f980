"""Phases that make a stage block by block; a killed one continues with what is missing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from attrs import frozen
from torch import Tensor

from arb_ternary.errors import ArbError
from arb_ternary.protocols.runs import PhaseResult
from arb_ternary_upcycle.float_model import FloatModel
from arb_ternary_upcycle.float_model_writer import FloatModelWriter

if TYPE_CHECKING:
    from arb_ternary_train.context import TrainingContext


@frozen(eq=False)
class Stage:
    """A stage to be written.

    Attributes:
        writer: writes it.
        ends: returns embedding, final norm and head.
        blocks: called with the numbers of the blocks that are on disk already (never all); yields
            number and tensors of each other block, in order.
    """

    writer: FloatModelWriter
    ends: Callable[[], Mapping[str, Tensor]]
    blocks: Callable[[frozenset[int]], Iterator[tuple[int, Mapping[str, Tensor]]]]


class StagePhase(ABC):
    """Writes a float model; the run's own model is not changed.

    A resumed phase writes the blocks that are missing in the files of the stage. Its state is its
    metrics, once it has them; then nothing is left to do.
    """

    name: str
    _metrics: Mapping[str, float] | None = None

    @abstractmethod
    def prepare(self, context: TrainingContext) -> Stage:
        """Check everything that can be wrong before anything is computed."""

    def judge(self, context: TrainingContext, model: FloatModel) -> Mapping[str, float]:
        """Return metrics of the finished stage.

        Raises:
            ArbError: it is of no use; no later phase will then take it.
        """
        return {}

    def run(self, context: TrainingContext) -> PhaseResult:
        """Write what is missing, then judge the whole; see ``Phase``."""
        if self._metrics is not None:
            return PhaseResult(steps=0, metrics=self._metrics)
        writer = self._write(context)
        try:
            self._metrics = dict(self.judge(context, writer.finish()))
        except ArbError:
            writer.reopen()
            raise
        context.mark_progress()
        context.save_checkpoint()
        return PhaseResult(steps=0, metrics=self._metrics)

    def _write(self, context: TrainingContext) -> FloatModelWriter:
        """Write the stage. What it was made from is out of memory when this returns."""
        stage = self.prepare(context)
        writer = stage.writer
        layers = writer.config.layers
        done = writer.written_blocks()
        written = len(done)
        reporter = context.logbook.reporter
        reporter.start(self.name, layers, written)
        if written < layers:
            for number, tensors in stage.blocks(done):
                writer.write_block(number, tensors)
                written += 1
                reporter.step(written, {}, False)
                context.stop_if_requested()
        if not writer.wrote_ends:
            writer.write_ends(stage.ends())
        reporter.stop()
        return writer

    def state_dict(self) -> dict[str, Any]:
        """Return the metrics, or None in their place before the phase has ended."""
        return {"metrics": self._metrics}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what is on disk when the phase runs."""
        self._metrics = state["metrics"]
