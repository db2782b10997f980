"""Scheduled batch: micro-batches up to a logical batch size."""

from __future__ import annotations

from typing import Any, ClassVar, Unpack

from torch.optim import Optimizer

from arb_ternary_gqc.errors import WrapperOptionError
from arb_ternary_gqc.parts import CommonOptions, Draw
from arb_ternary_gqc.wrapper import OptimizerWrapper


class ScheduledBatch(OptimizerWrapper):
    """SBC: steps after ``max(1, round(logical / physical))`` micro-batches, halves rounded to even.

    Schedulers on the wrapper drive the logical batch size.

    Args:
        optimizer: the optimizer that steps.
        physical_batch_size: samples per micro-batch.
        initial_logical_batch_size: initial samples per step; None = one micro-batch.
        max_batch_draws: most micro-batches per step.
        options: see :class:`OptimizerWrapper`.
    """

    decides_on_gradients: ClassVar[bool] = False

    def __init__(
        self,
        optimizer: Optimizer,
        physical_batch_size: int,
        initial_logical_batch_size: float | None = None,
        max_batch_draws: int = 64,
        **options: Unpack[CommonOptions],
    ) -> None:
        if physical_batch_size < 1:
            raise WrapperOptionError(
                f"gqc: physical_batch_size must be at least 1, not {physical_batch_size}"
            )
        self.physical_batch_size = physical_batch_size
        logical = initial_logical_batch_size
        if logical is None:
            logical = physical_batch_size
        super().__init__(optimizer, initial=logical, max_batch_draws=max_batch_draws, **options)

    @property
    def target_logical_batch_size(self) -> float:
        """Current samples per step."""
        return float(self.param_groups[0]["lr"])

    @property
    def target_draws(self) -> int:
        """Current micro-batches per step."""
        return max(1, round(self.target_logical_batch_size / self.physical_batch_size))

    def _wants_step(self, draw: Draw) -> bool:
        return self.num_draws >= self.target_draws

    def _own_statistics(self) -> dict[str, Any]:
        return {
            "target_draws": self.target_draws,
            "target_logical_batch_size": self.target_logical_batch_size,
            "physical_batch_size": self.physical_batch_size,
        }
