"""The check ``compare``: how far the numbers inside teacher and student are apart on held-out
text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import define
from torch import Tensor

from arb_ternary_train.protocols import CheckResult
from arb_ternary_upcycle.verification.conclusion import conclude
from arb_ternary_upcycle.verification.config import CompareConfig, Limits
from arb_ternary_upcycle.verification.pair import held_out_batches, logit_pieces, open_pair
from arb_ternary_upcycle.verification.reports import Findings, Judgement

if TYPE_CHECKING:
    from arb_ternary_train.context import TrainingContext


@define
class Difference:
    """Absolute differences of pairs of tensors: their sum and count, and the largest; not a number
    where one is.
    """

    total: float = 0.0
    count: int = 0
    largest: float = 0.0

    def add(self, first: Tensor, second: Tensor) -> None:
        """Count the differences of two tensors of one shape; sums are float64."""
        apart = (first.double() - second.double()).abs()
        self.total += float(apart.sum())
        self.count += apart.numel()
        self.largest = float(np.maximum(self.largest, float(apart.max())))

    @property
    def mean(self) -> float:
        """Mean absolute difference."""
        return self.total / max(1, self.count)

    def to_json(self) -> dict[str, float]:
        """As the report names them."""
        return {"mean_l1": self.mean, "max_l1": self.largest}


def together(parts: list[Difference]) -> Difference:
    """All of ``parts`` as one."""
    largest = float(np.maximum.reduce([part.largest for part in parts]))
    return Difference(sum(part.total for part in parts), sum(part.count for part in parts), largest)


class CompareCheck:
    """Compares what the attention layers give, and the logits.

    Both models read the same samples, each its own way: a layer's difference has those of the
    layers before it in it.
    """

    def __init__(self, config: CompareConfig) -> None:
        self.config = config

    def check(self, context: TrainingContext) -> CheckResult:
        """See ``Check``; the report has the differences of every layer."""
        config = self.config
        pair = open_pair(context, config.teacher)
        if config.attention is not None:
            pair.require_same_layers()
        batches = held_out_batches(context, config.batches, config.batch_size, config.block_size)
        layers = [Difference() for _ in range(min(pair.teacher.layers, pair.student.layers))]
        logits = Difference()

        def compare(layer: int, teacher: Tensor, student: Tensor) -> None:
            layers[layer].add(teacher, student)

        attended = compare if config.attention is not None else None
        for _, *streams in pair.streams([batch.inputs for batch in batches], attended):
            if config.logits is not None:
                for _, teacher, student in logit_pieces(pair, *streams):
                    logits.add(teacher, student)
        compared = {
            "batches": len(batches),
            "tokens": sum(batch.inputs.numel() for batch in batches),
        }
        judged: list[Judgement] = []
        metrics: dict[str, float] = {}
        details: dict[str, Any] = {**compared, "teacher": str(pair.teacher.model.path)}
        if config.attention is not None:
            judged += _judged("attention", together(layers), config.attention, metrics)
            details["layers"] = [layer.to_json() for layer in layers]
        if config.logits is not None:
            judged += _judged("logits", logits, config.logits, metrics)
        return conclude(
            context, "compare", config, Findings(judged=judged, metrics=metrics, details=details)
        )


def _judged(
    what: str, found: Difference, limits: Limits, metrics: dict[str, float]
) -> list[Judgement]:
    numbers = found.to_json()
    metrics.update({f"{what}_{name}": value for name, value in numbers.items()})
    allowed = {"mean_l1": limits.max_mean_l1, "max_l1": limits.max_max_l1}
    return [
        Judgement(f"{what} {name}", numbers[name], limit)
        for name, limit in allowed.items()
        if limit is not None
    ]


def build(config: CompareConfig) -> CompareCheck:
    """Factory of the check ``compare``."""
    return CompareCheck(config)
