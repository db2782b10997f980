"""Gradient norm threshold: draw until the mean gradient is small enough."""

from __future__ import annotations

from typing import Any, Unpack

from torch.optim import Optimizer

from arb_ternary_gqc.gradients import as_number, on_host
from arb_ternary_gqc.parts import CommonOptions, Draw
from arb_ternary_gqc.wrapper import OptimizerWrapper


class GradientNormThreshold(OptimizerWrapper):
    """GNTS: steps if ``norm(sum of gradients) / draws < threshold``, or after the most draws.

    Averaging reduces the noise in a gradient but not its signal, so that the threshold sets how
    much noise a step may have. Schedulers on the wrapper drive the threshold, initially 1.0.

    Args:
        optimizer: the optimizer that steps.
        max_batch_draws: most micro-batches per step.
        threshold: initial norm.
        per_group: give each param group of the inner optimizer a threshold of its own; all must be
            met.
        options: see :class:`OptimizerWrapper`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        max_batch_draws: int = 64,
        *,
        threshold: float = 1.0,
        per_group: bool = False,
        **options: Unpack[CommonOptions],
    ) -> None:
        super().__init__(
            optimizer,
            initial=threshold,
            max_batch_draws=max_batch_draws,
            per_group=per_group,
            **options,
        )

    @property
    def norm_threshold(self) -> float:
        """The current threshold of the first group."""
        return float(self.param_groups[0]["lr"])

    def _wants_step(self, draw: Draw) -> bool:
        portions = self._portions() if self.per_group else []
        norms = [self._sum.norm(each.parameters, each.modules) for each in portions]
        whole, *parts = on_host([self._sum_norm(draw), *norms])
        norm = self._measure(whole)
        if not self.per_group:
            # Compared as tensors, in the gradients' own precision.
            return bool(as_number(norm < self.norm_threshold))
        return all(
            as_number(part / self.num_draws < portion.group["lr"])
            for part, portion in zip(parts, portions, strict=True)
        )

    def _own_statistics(self) -> dict[str, Any]:
        return {"norm_threshold": self.norm_threshold}
