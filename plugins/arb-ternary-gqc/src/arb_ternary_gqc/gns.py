"""Gradient noise scale: draw until more micro-batches would not pay off."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, Unpack, get_args

import numpy as np
from torch.optim import Optimizer

from arb_ternary.errors import ConfigError
from arb_ternary_gqc.errors import WrapperOptionError
from arb_ternary_gqc.gradients import as_number, on_host
from arb_ternary_gqc.parts import CommonOptions, Draw
from arb_ternary_gqc.wrapper import OptimizerWrapper

Estimator = Literal["mccandlish", "norm_variance"]

_EPSILON: Final = 1e-8


def mccandlish(norms: Sequence[float], mean_norm: float) -> float | None:
    """Estimate the simple noise scale, in micro-batches.

    McCandlish et al., "An Empirical Model of Large-Batch Training", 2018, appendix A.1. With the
    norms of ``n`` micro-batch gradients ``g_i`` and of their mean ``G_n``, unbiased estimates are
    ``|G|^2 = (n |G_n|^2 - mean |g_i|^2) / (n - 1)`` of the true gradient's squared norm and ``S =
    (mean |g_i|^2 - |G_n|^2) / (1 - 1/n)`` of the trace of the covariance.

    Returns:
        ``S / |G|^2``; None for fewer than two norms, or if the estimate of ``|G|^2`` is not
        positive.
    """
    n = len(norms)
    if n < 2:
        return None
    squares = math.fsum(norm * norm for norm in norms) / n
    signal = (n * mean_norm * mean_norm - squares) / (n - 1)
    noise = (squares - mean_norm * mean_norm) / (1 - 1 / n)
    return noise / signal if signal > 0 else None


def norm_variance(norms: Sequence[float]) -> float | None:
    """Return ``var(norms) / (mean(norms^2) + 1e-8)``, always below 1; None for less than two."""
    if len(norms) < 2:
        return None
    values = np.array(norms)
    return float(np.var(values) / (np.mean(values**2) + _EPSILON))


class GradientNoiseScale(OptimizerWrapper):
    """GNS: steps if ``noise scale <= draws * noise_multiplier``, or after the most draws.

    The first draw has no noise scale. Schedulers on the wrapper drive the learning rate of the
    inner optimizer.

    Args:
        optimizer: the optimizer that steps.
        noise_multiplier: a smaller one accepts less noise.
        max_batch_draws: most micro-batches per step.
        estimator: ``"mccandlish"`` needs the norm of a sum of gradients, which is known for float
            parameters only: ternary modules are left out. ``"norm_variance"`` is the estimator of
            torch-gqc 0.7.0: it needs norms only, never steps at the first draw, and always steps at
            the second with the default multiplier.
        options: see :class:`OptimizerWrapper`.

    Raises:
        ConfigError: ``"mccandlish"`` without a float parameter.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        noise_multiplier: float = 1.0,
        max_batch_draws: int = 64,
        estimator: Estimator = "mccandlish",
        **options: Unpack[CommonOptions],
    ) -> None:
        if estimator not in get_args(Estimator):
            raise WrapperOptionError(
                f"gqc: estimator must be 'mccandlish' or 'norm_variance', not {estimator!r}"
            )
        self.noise_multiplier = noise_multiplier
        self.estimator = estimator
        self.grad_norms: list[float] = []
        self.estimated_gns: float | None = None
        super().__init__(optimizer, initial=None, max_batch_draws=max_batch_draws, **options)
        if estimator == "mccandlish" and not self._parameters:
            raise ConfigError(
                "gqc: estimator mccandlish needs the norm of the sum of several gradients, but a "
                "ternary module only has the norm of each",
                "Use gqc.gnts or gqc.sbc, or estimator: norm_variance.",
            )

    def _wants_step(self, draw: Draw) -> bool:
        float_norms = []
        if self.estimator == "mccandlish" and self._modules:
            float_norms = [each.norm(self._parameters, ()) for each in (self._sum, draw.gradients)]
        whole, *floats = on_host([self._sum_norm(draw), *float_norms])
        norm = self._measure(whole)
        draw_norm = draw.norm
        if floats:
            norm = floats[0] / self.num_draws
            draw_norm = floats[1]
        self.grad_norms.append(as_number(draw_norm))
        if self.estimator == "norm_variance":
            self.estimated_gns = norm_variance(self.grad_norms)
        else:
            self.estimated_gns = mccandlish(self.grad_norms, as_number(norm))
        return (
            self.estimated_gns is not None
            and self.estimated_gns <= self.num_draws * self.noise_multiplier
        )

    def _most_draws(self) -> int:
        least = 2 if self.estimator == "norm_variance" else 1
        return max(least, self.max_batch_draws)

    def _after_step(self) -> None:
        self.grad_norms = []

    def _own_statistics(self) -> dict[str, Any]:
        return {"noise_multiplier": self.noise_multiplier, "estimated_gns": self.estimated_gns}

    def _own_state(self) -> dict[str, Any]:
        return {"grad_norms": list(self.grad_norms), "estimated_gns": self.estimated_gns}

    def _load_own_state(self, state: Mapping[str, Any]) -> None:
        self.grad_norms = list(state["grad_norms"])
        self.estimated_gns = state["estimated_gns"]


class OptimizerWrapperGNS(GradientNoiseScale):
    """GNS with the name and decisions of torch-gqc 0.7.0: the estimator is ``norm_variance``."""

    def __init__(
        self,
        optimizer: Optimizer,
        noise_multiplier: float = 1.0,
        max_batch_draws: int = 64,
        estimator: Estimator = "norm_variance",
        **options: Unpack[CommonOptions],
    ) -> None:
        super().__init__(optimizer, noise_multiplier, max_batch_draws, estimator, **options)
