"""How much noise a picture has at a time, and what a model may predict of it.

A noisy sample is ``x_t = alpha x_0 + sigma epsilon``, where ``alpha**2 = alpha_bar(t) = 1 -
sigma**2`` and ``epsilon`` is Gaussian; time runs from 0, where ``x_t`` is the sample, to 1, where
it is noise. Of ``x_0``, ``epsilon`` and ``v = alpha epsilon - sigma x_0`` (Salimans and Ho,
Progressive Distillation, 2022) each gives the two others, once ``x_t`` is known.

Shapes: ``B`` samples; ``...`` is whatever a sample is.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import torch
from torch import Tensor

from arb_ternary_diffusion.noise_config import PredictionName, ScheduleName

# : Least ``alpha_bar``: the end of the linear schedule has 4e-5, that of the cosine would have 0,
# from which no sample : could be told.
_LEAST: Final = 1e-5
#: Nichol and Dhariwal's offset, which keeps the first steps from being too small.
_OFFSET: Final = 0.008
# : The rates of noise at both ends, a thousand steps of Ho et al. (1e-4 to 0.02) being a unit of
# time.
_BETA: Final = (0.1, 20.0)


class Level(NamedTuple):
    """``alpha`` and ``sigma`` of each sample, of a shape that multiplies samples."""

    alpha: Tensor
    sigma: Tensor


class Parts(NamedTuple):
    """What ``x_t`` is made of."""

    x0: Tensor
    epsilon: Tensor


def alpha_bar(schedule: ScheduleName, time: Tensor) -> Tensor:
    """Share of the sample in the variance of ``x_t``, float64 of the shape of ``time``, at least
    1e-5.

    ``cosine``: ``cos(pi/2 (t + s) / (1 + s))**2`` over its value at 0, ``s = 0.008`` (Nichol and
    Dhariwal, Improved DDPM, 2021). ``linear``: ``exp(-integral of beta)`` with ``beta`` from 0.1 to
    20, which is the product of Ho et al. (DDPM, 2020) in the limit of many steps (Song et al.,
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
    """``alpha`` and ``sigma`` at ``time_B``, ``[B, 1, ...]`` with as many dimensions, and the
    dtype, of ``like``.
    """
    kept = alpha_bar(schedule, time_B).view(-1, *[1] * (like.dim() - 1))
    return Level(kept.sqrt().to(like.dtype), (1 - kept).sqrt().to(like.dtype))


def noisy(parts: Parts, at: Level) -> Tensor:
    """``x_t``."""
    return at.alpha * parts.x0 + at.sigma * parts.epsilon


def target_of(prediction: PredictionName, parts: Parts, at: Level) -> Tensor:
    """What a model that predicts ``prediction`` is to say."""
    if prediction == "v":
        return at.alpha * parts.epsilon - at.sigma * parts.x0
    return parts.x0 if prediction == "x0" else parts.epsilon


def parts_of(prediction: PredictionName, predicted: Tensor, x_t: Tensor, at: Level) -> Parts:
    """What ``x_t`` is made of, as a model says that predicts ``prediction``.

    From ``x0`` there is no ``epsilon`` at time 0, where ``sigma`` is 0.
    """
    if prediction == "v":
        return Parts(at.alpha * x_t - at.sigma * predicted, at.sigma * x_t + at.alpha * predicted)
    if prediction == "x0":
        return Parts(predicted, (x_t - at.alpha * predicted) / at.sigma)
    return Parts((x_t - at.sigma * predicted) / at.alpha, predicted)
