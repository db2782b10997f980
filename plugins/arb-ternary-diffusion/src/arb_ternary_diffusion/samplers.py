"""From noise to samples, step by step: DDIM (Song et al., 2021) and DDPM (Ho et al., 2020).

Both go over the same grid of times, ``1 = t_0 > t_1 > ... > t_K = 0``, and ask the denoiser at each
but the last. Every step is computed in the dtype of the noise, whatever the denoiser computes in.

Shapes: ``B`` samples; ``...`` is whatever a sample is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from arb_ternary_diffusion.noise import Level, Parts, level, parts_of
from arb_ternary_diffusion.noise_config import PredictionName, ScheduleName

SamplerName = Literal["ddim", "ddpm"]
#: ``(x_t [B, ...], time [B]) -> prediction [B, ...]``.
Denoiser = Callable[[Tensor, Tensor], Tensor]


def guided(conditional: Denoiser, unconditional: Denoiser, weight: float) -> Denoiser:
    """``u + w (c - u)``: classifier-free guidance (Ho and Salimans, 2022; their ``w`` is one less).

    Weight 1 is the conditional denoiser and 0 the other, of which neither then asks the other one.
    It does not matter what the two predict: at a given ``x_t`` each of the three is a linear
    function of each.
    """
    if weight in (0.0, 1.0):
        return conditional if weight else unconditional

    def predicted(x_t: Tensor, time_B: Tensor) -> Tensor:
        without = unconditional(x_t, time_B)
        return without + weight * (conditional(x_t, time_B) - without)

    return predicted


def draw(
    denoiser: Denoiser,
    noise: Tensor,
    *,
    prediction: PredictionName,
    schedule: ScheduleName,
    steps: int,
    sampler: SamplerName = "ddim",
    eta: float = 0.0,
    limit: float | None = 1.0,
    fresh: Callable[[], Tensor] | None = None,
) -> Tensor:
    """Samples that ``noise``, float32 ``[B, ...]``, becomes in ``steps`` steps; of its shape,
    device and dtype.

    Args:
        denoiser: predicts ``prediction``.
        noise: Gaussian, of unit variance.
        prediction: what the denoiser predicts.
        schedule: that it was trained with.
        steps: evaluations of the denoiser.
        sampler: ``ddim``, or ``ddpm``, which draws from the posterior of each step: its variance is
            the smaller of the two that Ho et al. name.
        eta: noise that DDIM adds: 0 = none, a map from noise to samples; 1 = as much as DDPM.
        limit: largest absolute value that a sample can have: what exceeds it is cut in every step;
            None = any.
        fresh: draws the noise that is added in a step, of the shape of ``noise``; None = from
            torch's own generator.

    Raises:
        ValueError: there is not one step, or ``eta`` is given to DDPM or is negative.
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, not {steps}")
    if eta < 0 or (eta and sampler != "ddim"):
        raise ValueError(
            f"eta must be 0 or greater, and is an option of ddim alone; it is {eta} for {sampler}"
        )
    grid = torch.linspace(1, 0, steps + 1, dtype=torch.float64).tolist()
    x_t = noise
    for number, time in enumerate(grid[:-1]):
        time_B = torch.full((len(x_t),), time, dtype=torch.float32, device=x_t.device)
        now = level(schedule, time_B, x_t)
        parts = parts_of(prediction, denoiser(x_t, time_B).to(x_t.dtype), x_t, now)
        if limit is not None:
            x0 = parts.x0.clamp(-limit, limit)
            parts = Parts(x0, (x_t - now.alpha * x0) / now.sigma)
        if number == steps - 1:
            return parts.x0
        after = level(schedule, torch.full_like(time_B, grid[number + 1]), x_t)
        added = torch.zeros_like(x_t)
        if sampler == "ddpm" or eta:
            added = torch.randn_like(x_t) if fresh is None else fresh().to(x_t)
        x_t = (
            _ddpm(parts.x0, x_t, now, after, added)
            if sampler == "ddpm"
            else _ddim(parts, now, after, eta, added)
        )
    raise AssertionError


def _ddim(parts: Parts, now: Level, after: Level, eta: float, fresh: Tensor) -> Tensor:
    """Equations 12 and 16 of Song et al."""
    kept = (now.alpha / after.alpha).square()
    spread = eta * (after.sigma / now.sigma) * (1 - kept).sqrt()
    along = (after.sigma.square() - spread.square()).clamp_min(0).sqrt()
    return after.alpha * parts.x0 + along * parts.epsilon + spread * fresh


def _ddpm(x0: Tensor, x_t: Tensor, now: Level, after: Level, fresh: Tensor) -> Tensor:
    """Equations 6 and 7 of Ho et al.: the posterior of the step, ``1 - kept`` being their
    ``beta_t``.
    """
    kept = (now.alpha / after.alpha).square()
    variance = now.sigma.square()
    mean = (
        after.alpha * (1 - kept) / variance * x0
        + kept.sqrt() * after.sigma.square() / variance * x_t
    )
    return mean + ((1 - kept) * after.sigma.square() / variance).sqrt() * fresh
