"""A phase that makes a stage: block by block, so that it goes on after a kill with the blocks that
there are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from arb_ternary.errors import ArbError
from arb_ternary.protocols.runs import PhaseResult
from arb_ternary_upcycle.float_model import FloatModel
from arb_ternary_upcycle.float_model_writer import FloatModelWriter

if TYPE_CHECKING:
    from arb_ternary_train.context import TrainingContext


class StagePhase(ABC):
    """Writes a float model; the run's own model stays as it is.

    What it has done lies in the files of the stage: a resumed phase writes the blocks that are
    missing. Its state are its final numbers, once it has them; then nothing is left to do.
    """

    _metrics: Mapping[str, float] | None = None

    @property
    @abstractmethod
    def name(self) -> str:
        """Of the phase."""

    @abstractmethod
    def writer(self, context: TrainingContext) -> FloatModelWriter:
        """Check everything that can be wrong, and say what will be written where."""

    @abstractmethod
    def ends(self) -> Mapping[str, Tensor]:
        """Embedding, final norm and head."""

    @abstractmethod
    def blocks(self, done: frozenset[int]) -> Iterator[tuple[int, Mapping[str, Tensor]]]:
        """The blocks that are not ``done``, in order."""

    @abstractmethod
    def judge(self, context: TrainingContext, model: FloatModel) -> Mapping[str, float]:
        """Final numbers of the finished model; raises where it is not what it should be."""

    def run(self, context: TrainingContext) -> PhaseResult:
        """Write what is missing, then judge the whole; see ``Phase``."""
        if self._metrics is not None:
            return PhaseResult(steps=0, metrics=self._metrics)
        writer = self.writer(context)
        done = writer.written_blocks()
        reporter = context.logbook.reporter
        reporter.start(self.name, writer.config.layers, len(done))
        for number, tensors in self.blocks(done) if len(done) < writer.config.layers else ():
            writer.write_block(number, tensors)
            done |= {number}
            reporter.step(len(done), {}, False)
            context.stop_if_requested()
        if not writer.wrote_ends:
            writer.write_ends(self.ends())
        reporter.stop()
        try:
            self._metrics = dict(self.judge(context, writer.finish()))
        except ArbError:
            writer.reopen()  # no later phase is to take it
            raise
        context.mark_progress()
        context.save_checkpoint()
        return PhaseResult(steps=0, metrics=self._metrics)

    def state_dict(self) -> dict[str, Any]:
        """The final numbers, once there are some."""
        return {"metrics": self._metrics}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what is on disk when the phase is run."""
        self._metrics = state["metrics"]
