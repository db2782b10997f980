"""The tracker ``confusion_matrix``: a figure of which classes a model mistakes for which."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from attrs import frozen

from arb_ternary import hookimpl
from arb_ternary.config.options import option, optional, positive

if TYPE_CHECKING:
    from arb_ternary_train.context import TrainingContext


@frozen(kw_only=True)
class ConfusionConfig:
    """Options of the tracker ``confusion_matrix``."""

    path: str = option(
        "confusion_matrix.png", "the figure (.png, .svg, .pdf), relative to the run directory"
    )
    batches: int | None = option(
        None, "number of held-out batches to count; null = all", validator=optional(positive)
    )


class ConfusionMatrix:
    """Draws the matrix at every evaluation, and at the end of the run if that is later.

    It classifies the held-out samples itself and does not change the run.
    """

    def __init__(self, config: ConfusionConfig) -> None:
        self.config = config
        self._drawn_at: int | None = None

    @hookimpl
    def arb_eval_end(self, context: TrainingContext, step: int, metrics: Mapping[str, Any]) -> None:
        self._draw(context)

    @hookimpl
    def arb_run_end(self, context: TrainingContext, status: str) -> None:
        if status == "finished" and self._drawn_at != context.step:
            self._draw(context)

    def _draw(self, context: TrainingContext) -> None:
        # Imported here, because a config is read without torch and without matplotlib.
        from arb_ternary_train.capabilities import attachments
        from arb_ternary_train.plot import save_figure
        from arb_ternary_vision.figures import draw_confusion
        from arb_ternary_vision.predictions import class_names, classify_batches

        data = context.data
        batch_size, block_size = context.shape_to_evaluate
        predictions = classify_batches(
            context.model,
            data.held_out(batch_size, block_size, self.config.batches),
            context.masking,
            vocabulary_size=data.vocabulary_size,
            seed=context.seed,
            step=context.step,
            device=context.device,
        )
        counts = predictions.confusion()
        names = class_names(attachments(data), len(counts))
        accuracy = predictions.correct.mean()
        title = f"step {context.step:,}: {100 * accuracy:.1f} % of {counts.sum():,} right"
        save_figure(draw_confusion(counts, names, title), context.directory / self.config.path)
        self._drawn_at = context.step


def build_confusion_matrix(config: ConfusionConfig) -> ConfusionMatrix:
    """Build the tracker ``confusion_matrix``."""
    return ConfusionMatrix(config)
