"""Samplers from noise to samples: DDIM (Song et al., 2021) and DDPM (Ho et al., 2020).

Both use the same times ``1 = t_0 > t_1 > ... > t_K = 0`` and evaluate the model at each but the
last. Steps are computed in the dtype of the noise, whatever dtype the model computes in.

Shapes: ``B`` samples; ``...`` is the shape of a sample.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from arb_ternary_diffusion.noise import Level, Parts, level, split_noise
from arb_ternary_diffusion.noise_config import PredictionName, ScheduleName

SamplerName = Literal["ddim", "ddpm"]
#: ``(x_t [B, ...], time [B]) -> prediction [B, ...]``.
Predict = Callable[[Tensor, Tensor], Tensor]


def guide(conditional: Predict, unconditional: Predict, weight: float) -> Predict:
    """Return ``u + w (c - u)``: classifier-free guidance.

    The weight of Ho and Salimans (2022) is one less. Weight 1 is the conditional prediction alone,
    and 0 the unconditional one. The result does not depend on what the two predict, because at a
    given ``x_t`` each prediction is a linear function of each other.
    """
    if weight == 0.0:
        return unconditional
    if weight == 1.0:
        return conditional

    def predict(x_t: Tensor, time_B: Tensor) -> Tensor:
        base = unconditional(x_t, time_B)
        return base + weight * (conditional(x_t, time_B) - base)

    return predict


def draw(
    predict: Predict,
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
    """Turn ``noise``, float32 ``[B, ...]``, into samples of its shape, device and dtype.

    Args:
        predict: evaluates the model.
        noise: Gaussian, of unit variance.
        prediction: what the model predicts.
        schedule: the schedule that it was trained with.
        steps: number of evaluations of the model, at least 1.
        sampler: ``ddim``, or ``ddpm``, which draws from the posterior of each step, with the
            smaller of the two variances of Ho et al.
        eta: noise that DDIM adds: 0 = none, a map from noise to samples; 1 = as much as DDPM. DDPM
            ignores it.
        limit: largest absolute value of a sample; larger values are clipped in every step. None =
            no limit.
        fresh: draws the noise that a step adds, of the shape of ``noise``; None = from torch's
            global generator.
    """
    times = torch.linspace(1, 0, steps + 1, dtype=torch.float64).tolist()
    x_t = noise
    for number, time in enumerate(times[:-1]):
        time_B = torch.full((len(x_t),), time, dtype=torch.float32, device=x_t.device)
        now = level(schedule, time_B, x_t)
        parts = split_noise(prediction, predict(x_t, time_B).to(x_t.dtype), x_t, now)
        if limit is not None:
            x0 = parts.x0.clamp(-limit, limit)
            parts = Parts(x0, (x_t - now.alpha * x0) / now.sigma)
        if number == steps - 1:
            break

        after = level(schedule, torch.full_like(time_B, times[number + 1]), x_t)
        added = torch.zeros_like(x_t)
        if sampler == "ddpm" or eta:
            added = torch.randn_like(x_t) if fresh is None else fresh().to(x_t)
        if sampler == "ddpm":
            x_t = _ddpm(parts.x0, x_t, now, after, added)
        else:
            x_t = _ddim(parts, now, after, eta, added)
    return parts.x0


def _ddim(parts: Parts, now: Level, after: Level, eta: float, fresh: Tensor) -> Tensor:
    """Take a step by equations 12 and 16 of Song et al."""
    kept = (now.alpha / after.alpha).square()
    spread = eta * (after.sigma / now.sigma) * (1 - kept).sqrt()
    along = (after.sigma.square() - spread.square()).clamp_min(0).sqrt()
    return after.alpha * parts.x0 + along * parts.epsilon + spread * fresh


def _ddpm(x0: Tensor, x_t: Tensor, now: Level, after: Level, fresh: Tensor) -> Tensor:
    """Take a step by equations 6 and 7 of Ho et al.; ``1 - kept`` is their ``beta_t``."""
    kept = (now.alpha / after.alpha).square()
    variance = now.sigma.square()
    mean = (
        after.alpha * (1 - kept) / variance * x0
        + kept.sqrt() * after.sigma.square() / variance * x_t
    )
    return mean + ((1 - kept) * after.sigma.square() / variance).sqrt() * fresh
