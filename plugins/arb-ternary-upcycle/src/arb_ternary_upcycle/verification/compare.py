"""The check ``compare``: differences between the numbers inside teacher and student."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import define
from torch import Tensor

from arb_ternary.errors import ConfigError
from arb_ternary_train.protocols import CheckResult
from arb_ternary_upcycle.verification.conclusion import conclude
from arb_ternary_upcycle.verification.config import CompareConfig, Limits
from arb_ternary_upcycle.verification.pair import Pair, held_out_batches, open_pair
from arb_ternary_upcycle.verification.reports import Judgement, judge

if TYPE_CHECKING:
    from arb_ternary_train.context import TrainingContext


@define
class Difference:
    """Absolute differences of pairs of tensors; NaN if one of them is.

    Attributes:
        total: their sum.
        count: how many.
        largest: the largest.
    """

    total: float = 0.0
    count: int = 0
    largest: float = 0.0

    def add(self, first: Tensor, second: Tensor) -> None:
        """Add the differences of two tensors of one shape; sums are float64."""
        apart = (first.double() - second.double()).abs()
        self.merge(Difference(float(apart.sum()), apart.numel(), float(apart.max())))

    def merge(self, other: Difference) -> None:
        """Add other differences."""
        self.total += other.total
        self.count += other.count
        self.largest = float(np.maximum(self.largest, other.largest))  # keeps NaN

    def to_json(self) -> dict[str, float]:
        """Return mean and maximum, as the report names them."""
        return {"mean_l1": self.total / max(1, self.count), "max_l1": self.largest}


@define(eq=False)
class CompareCheck:
    """Compares the outputs of the attention layers, and the logits, on held-out text.

    Each model continues from its own residual stream, so that a layer's difference includes those
    of the layers before it.
    """

    config: CompareConfig

    def check(self, context: TrainingContext) -> CheckResult:
        """See ``Check``; the report has the differences of every layer."""
        config = self.config
        pair = open_pair(context, config.teacher)
        if config.attention is not None:
            _require_same_layers(pair)
        batches = held_out_batches(context, config.batches, config.batch_size, config.block_size)
        layers = [Difference() for _ in range(min(model.layers for model in pair.configs))]
        logits = Difference()

        def compare(layer: int, teacher: Tensor, student: Tensor) -> None:
            layers[layer].add(teacher, student)

        on_attention = None if config.attention is None else compare
        for _, *streams in pair.streams([batch.inputs for batch in batches], on_attention):
            if config.logits is not None:
                for _, teacher, student in pair.logits(*streams):
                    logits.add(teacher, student)

        judged: list[Judgement] = []
        metrics: dict[str, float] = {}
        details: dict[str, Any] = {
            "batches": len(batches),
            "tokens": sum(batch.inputs.numel() for batch in batches),
            "teacher": str(pair.teacher.path),
        }
        if config.attention is not None:
            whole = Difference()
            for layer in layers:
                whole.merge(layer)
            judged += _judged("attention", whole, config.attention, metrics)
            details["layers"] = [layer.to_json() for layer in layers]
        if config.logits is not None:
            judged += _judged("logits", logits, config.logits, metrics)
        return conclude(context, "compare", config, judged, metrics, details)


def _require_same_layers(pair: Pair) -> None:
    """Refuse to compare attention layer by layer if the models have other layers."""
    teacher, student = pair.configs
    if (student.layers, student.width) != (teacher.layers, teacher.width):
        raise ConfigError(
            f"attention: the student has {student.layers} layers of width {student.width}, the "
            f"teacher {teacher.layers} of {teacher.width}",
            "Compare the logits alone: leave `attention` out.",
        )


def _judged(
    what: str, found: Difference, limits: Limits, metrics: dict[str, float]
) -> list[Judgement]:
    """Judge mean and maximum, and add them to ``metrics``."""
    numbers = found.to_json()
    for name, value in numbers.items():
        metrics[f"{what}_{name}"] = value
    return [
        *judge(f"{what} mean_l1", numbers["mean_l1"], limits.max_mean_l1),
        *judge(f"{what} max_l1", numbers["max_l1"], limits.max_max_l1),
    ]
