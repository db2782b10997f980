"""Metric hypothesis test: draw until the mean of a metric, usually the loss, is precise enough."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final, Unpack

import numpy as np
from scipy.special import stdtrit
from torch import Tensor
from torch.optim import Optimizer

from arb_ternary_gqc.errors import WrapperOptionError
from arb_ternary_gqc.parts import CommonOptions, Draw
from arb_ternary_gqc.wrapper import OptimizerWrapper

#: Added to a standard error, so that equal metrics have an interval.
_EPSILON: Final = 1e-12


def is_precise(metrics: list[float], running: float, confidence: float, tolerance: float) -> bool:
    """Test whether the mean of ``[running, *metrics]`` is known within ``mean * (1 +- tolerance)``.

    Its confidence interval is Student's, ``mean +- t * (s / sqrt(n) + 1e-12)`` with ``n - 1``
    degrees of freedom. Fewer than two metrics, or a mean of zero, are never precise.
    """
    if len(metrics) < 2:
        return False
    samples = np.array([running, *metrics])
    mean = float(np.mean(samples))
    if mean == 0:
        return False
    error = float(np.std(samples, ddof=1) / np.sqrt(len(samples))) + _EPSILON
    reach = float(stdtrit(len(samples) - 1, (1 + confidence) / 2)) * error
    # For a negative mean the edges change places.
    low, high = sorted((mean * (1 - tolerance), mean * (1 + tolerance)))
    return mean - reach >= low and mean + reach <= high


class MetricHypothesisTest(OptimizerWrapper):
    """MHT: steps if a t-test finds the mean metric precise enough, or after the most draws.

    The running average of earlier steps is one more sample of the test. After a step the mean of
    its metrics is added to it. Schedulers on the wrapper drive the learning rate of the inner
    optimizer.

    Args:
        optimizer: the optimizer that steps.
        confidence: confidence level of the interval, between 0 and 1.
        error_tolerance: largest relative error of the mean.
        ema_alpha: weight of a step in the running average.
        max_batch_draws: most micro-batches per step.
        options: see :class:`OptimizerWrapper`.
    """

    decides_on_gradients: ClassVar[bool] = False

    def __init__(
        self,
        optimizer: Optimizer,
        confidence: float = 0.98,
        error_tolerance: float = 0.03,
        ema_alpha: float = 0.01,
        max_batch_draws: int = 64,
        **options: Unpack[CommonOptions],
    ) -> None:
        if not 0 < confidence < 1:
            raise WrapperOptionError(f"gqc: confidence must lie between 0 and 1, not {confidence}")
        if error_tolerance < 0:
            raise WrapperOptionError(
                f"gqc: error_tolerance must not be negative, not {error_tolerance}"
            )
        if not 0 <= ema_alpha <= 1:
            raise WrapperOptionError(f"gqc: ema_alpha must lie between 0 and 1, not {ema_alpha}")
        self.confidence = confidence
        self.error_tolerance = error_tolerance
        self.ema_alpha = ema_alpha
        self.running_avg_metric: float | None = None
        self.stage_metrics: list[float] = []
        super().__init__(optimizer, initial=None, max_batch_draws=max_batch_draws, **options)

    def step(  # type: ignore[override]
        self,
        metric: Tensor | float | None = None,
        closure: Callable[[], Any] | None = None,
        *,
        loss_signal: Tensor | float | None = None,
    ) -> bool:
        """See :meth:`OptimizerWrapper.step`.

        Args:
            metric: metric of the micro-batch; by default ``loss_signal``, or the loss that
                ``closure`` returns.
            closure: runs forward and backward.
            loss_signal: loss of the micro-batch.

        Raises:
            TypeError: there is no metric.
        """
        metric = loss_signal if metric is None else metric
        if metric is None and closure is None:
            raise TypeError(
                "MetricHypothesisTest.step needs the metric of the micro-batch: step(loss)"
            )
        return self._advance(closure, loss_signal, metric)

    def _wants_step(self, draw: Draw) -> bool:
        if draw.metric is None:
            raise TypeError(
                "MetricHypothesisTest.step: the closure returned no loss, and no metric was given"
            )
        self.stage_metrics.append(draw.metric)
        if self.running_avg_metric is None:
            self.running_avg_metric = draw.metric
        return is_precise(
            self.stage_metrics, self.running_avg_metric, self.confidence, self.error_tolerance
        )

    def _after_step(self) -> None:
        assert self.running_avg_metric is not None
        mean = float(np.mean(self.stage_metrics))
        self.running_avg_metric = (
            self.ema_alpha * mean + (1 - self.ema_alpha) * self.running_avg_metric
        )
        self.stage_metrics = []

    def _own_statistics(self) -> dict[str, Any]:
        return {"running_avg_metric": self.running_avg_metric}

    def _own_state(self) -> dict[str, Any]:
        return {
            "running_avg_metric": self.running_avg_metric,
            "stage_metrics": list(self.stage_metrics),
        }

    def _load_own_state(self, state: Mapping[str, Any]) -> None:
        self.running_avg_metric = state["running_avg_metric"]
        self.stage_metrics = list(state["stage_metrics"])
