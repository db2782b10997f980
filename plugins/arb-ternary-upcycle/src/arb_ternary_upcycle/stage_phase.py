"""A phase that makes a stage: block by block, so that it goes on after a kill with the blocks that there are."""

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

__all__ = ["StagePhase"]


class StagePhase(ABC):
    """Writes a float model; the run's own model stays as it is.

    Everything that it has done lies in the files of the stage, so that it has no state of its own: a resumed phase
    computes the same blocks, and writes those that are missing.
    """

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
        writer = self.writer(context)
        done, reporter = writer.written_blocks(), context.logbook.reporter
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
            metrics = self.judge(context, writer.finish())
        except ArbError:
            writer.reopen()  # no later phase is to take it
            raise
        context.save_checkpoint()
        return PhaseResult(steps=0, metrics=metrics)

    def state_dict(self) -> dict[str, Any]:
        """Nothing: what has been done is on disk."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what is on disk when the phase is run."""
        del state
