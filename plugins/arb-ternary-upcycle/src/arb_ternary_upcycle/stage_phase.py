"""Phases that make a stage block by block."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import frozen
from torch import Tensor

from arb_ternary.errors import ArbError
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_upcycle.float_model import MODEL_FILE, FloatModel, write_float_model
from arb_ternary_upcycle.once import OncePhase
from arb_ternary_upcycle.stage_options import FloatDtype

if TYPE_CHECKING:
    from arb_ternary_train.context import TrainingContext


@frozen(eq=False, kw_only=True)
class Stage:
    """A stage to be written.

    Attributes:
        folder, config, vocabulary_size, tokenizer, dtype, origin: see ``write_float_model``.
        blocks: yields the tensors of each block in order, by their names inside it.
        ends: returns embedding, final norm and head.
    """

    folder: Path
    config: DecoderConfig
    vocabulary_size: int
    tokenizer: Mapping[str, Any] | None
    dtype: FloatDtype
    origin: Mapping[str, Any]
    blocks: Callable[[], Iterable[Mapping[str, Tensor]]]
    ends: Callable[[], Mapping[str, Tensor]]


class StagePhase(OncePhase):
    """Writes a float model; the run's own model is not changed.

    A resumed phase writes its stage anew, unless that is complete.
    """

    @abstractmethod
    def prepare(self, context: TrainingContext) -> Stage:
        """Check everything that can be wrong before anything is computed."""

    def judge(self, context: TrainingContext, model: FloatModel) -> Mapping[str, float]:
        """Return metrics of the finished stage.

        Raises:
            ArbError: it is of no use; no later phase will then take it.
        """
        return {}

    def work(self, context: TrainingContext) -> Mapping[str, float]:
        """Write the stage, then judge it; see ``OncePhase``."""
        model = self._write(context)
        try:
            return self.judge(context, model)
        except ArbError:
            (model.path / MODEL_FILE).unlink()
            raise

    def _write(self, context: TrainingContext) -> FloatModel:
        """Write the stage. What it was made from is out of memory when this returns."""
        stage = self.prepare(context)
        reporter = context.logbook.reporter
        reporter.start(self.name, stage.config.layers, 0)

        def tensors() -> Iterator[Mapping[str, Tensor]]:
            for number, block in enumerate(stage.blocks()):
                yield {f"blocks.{number}.{name}": value for name, value in block.items()}
                reporter.step(number + 1, {}, False)
                context.stop_if_requested()
            yield stage.ends()

        model = write_float_model(
            stage.folder,
            stage.config,
            stage.vocabulary_size,
            stage.tokenizer,
            tensors(),
            dtype=stage.dtype,
            origin=stage.origin,
        )
        reporter.stop()
        return model
