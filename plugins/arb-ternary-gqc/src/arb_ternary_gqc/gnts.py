"""Gradient norm threshold: draw until the mean gradient is small enough."""

from __future__ import annotations

from typing import Any, Unpack

from torch.optim import Optimizer

from arb_ternary_gqc.gradients import as_number, on_host
from arb_ternary_gqc.parts import CommonOptions, Draw
from arb_ternary_gqc.wrapper import OptimizerWrapper


class GradientNormThreshold(OptimizerWrapper):
    """GNTS: steps when ``norm(sum of gradients) / draws < threshold``, or after
    ``max_batch_draws``.

    Averaging shrinks the noise in a gradient and leaves its signal, so that the threshold sets how
    much noise a step may have. Schedulers on the wrapper drive the threshold, 1.0 at first.

    Args:
        optimizer: the optimizer that steps.
        max_batch_draws: most micro-batches a step.
        threshold: initial norm.
        per_group: each param group of the inner optimizer has a threshold of its own; all must be
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
        """The current threshold, that of the first group."""
        return float(self.param_groups[0]["lr"])

    def _wants_step(self, draw: Draw) -> bool:
        portions = self._portions() if self.per_group else []
        whole, *parts = on_host(
            [
                self._sum_norm(draw),
                *(self._sum.norm(each.parameters, each.modules) for each in portions),
            ]
        )
        norm = self._measure(whole)
        if not self.per_group:
            # Compared as tensors: in the gradients' own precision.
            return bool(as_number(norm < self.norm_threshold))
        return all(
            as_number(part / self.num_draws < portion.group["lr"])
            for part, portion in zip(parts, portions, strict=True)
        )

    def _own_statistics(self) -> dict[str, Any]:
        return {"norm_threshold": self.norm_threshold}
