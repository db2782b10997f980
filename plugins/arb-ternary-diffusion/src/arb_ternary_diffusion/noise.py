"""Levels of noise, and what a model may predict for a noisy sample.

A noisy sample is ``x_t = alpha x_0 + sigma epsilon``, where ``alpha**2 = alpha_bar(t) = 1 -
sigma**2`` and ``epsilon`` is Gaussian. At time 0 ``x_t`` is the sample, at time 1 it is noise.
Given ``x_t``, each of ``x_0``, ``epsilon`` and ``v = alpha epsilon - sigma x_0`` (Salimans and Ho,
Progressive Distillation, 2022) determines the other two.

Shapes: ``B`` samples; ``...`` is the shape of a sample.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import torch
from torch import Tensor

from arb_ternary_diffusion.noise_config import PredictionName, ScheduleName

#: Lower bound of ``alpha_bar``. The linear schedule ends at 4e-5. The cosine schedule would end at
#: 0, from which the sample could not be recovered.
_LEAST: Final = 1e-5
#: Offset of Nichol and Dhariwal, which keeps the first steps from being too small.
_OFFSET: Final = 0.008
#: Rates of noise at times 0 and 1: a thousand steps of Ho et al. (1e-4 to 0.02) are one unit of
#: time.
_BETA: Final = (0.1, 20.0)


class Level(NamedTuple):
    """``alpha`` and ``sigma`` of each sample, in a shape that multiplies samples."""

    alpha: Tensor
    sigma: Tensor


class Parts(NamedTuple):
    """The sample and the noise that ``x_t`` is the sum of."""

    x0: Tensor
    epsilon: Tensor


def alpha_bar(schedule: ScheduleName, time: Tensor) -> Tensor:
    """Return the sample's share in the variance of ``x_t``, float64, at least 1e-5.

    ``cosine``: ``cos(pi/2 (t + s) / (1 + s))**2`` divided by its value at 0, with ``s = 0.008``
    (Nichol and Dhariwal, Improved DDPM, 2021). ``linear``: ``exp(-integral of beta)`` with ``beta``
    from 0.1 to 20, the limit of the product of Ho et al. (DDPM, 2020) for many steps (Song et al.,
    Score-Based Generative Modeling, 2021, equation 29).
    """
    time = time.double()
    if schedule == "linear":
        first, last = _BETA
        kept = torch.exp(-first * time - 0.5 * (last - first) * time.square())
    else:
        quarter = 0.5 * math.pi / (1 + _OFFSET)
        kept = (torch.cos((time + _OFFSET) * quarter) / math.cos(_OFFSET * quarter)).square()
    return kept.clamp_min(_LEAST)


def level(schedule: ScheduleName, time_B: Tensor, like: Tensor) -> Level:
    """Return ``alpha`` and ``sigma`` at ``time_B``, ``[B, 1, ...]``.

    They have the dtype and the number of dimensions of ``like``.
    """
    kept = alpha_bar(schedule, time_B).view(-1, *[1] * (like.dim() - 1))
    return Level(kept.sqrt().to(like.dtype), (1 - kept).sqrt().to(like.dtype))


def add_noise(parts: Parts, at: Level) -> Tensor:
    """Return ``x_t``."""
    return at.alpha * parts.x0 + at.sigma * parts.epsilon


def prediction_target(prediction: PredictionName, parts: Parts, at: Level) -> Tensor:
    """Return the right answer of a model that predicts ``prediction``."""
    if prediction == "v":
        return at.alpha * parts.epsilon - at.sigma * parts.x0
    return parts.x0 if prediction == "x0" else parts.epsilon


def split_noise(prediction: PredictionName, predicted: Tensor, x_t: Tensor, at: Level) -> Parts:
    """Return sample and noise of ``x_t`` according to a model that predicts ``prediction``.

    A model that predicts ``x0`` determines no ``epsilon`` at time 0, where ``sigma`` is 0.
    """
    if prediction == "v":
        return Parts(at.alpha * x_t - at.sigma * predicted, at.sigma * x_t + at.alpha * predicted)
    if prediction == "x0":
        return Parts(predicted, (x_t - at.alpha * predicted) / at.sigma)
    return Parts((x_t - at.sigma * predicted) / at.alpha, predicted)
