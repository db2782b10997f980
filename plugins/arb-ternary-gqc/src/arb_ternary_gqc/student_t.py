"""Quantiles of Student's t distribution with an integer number of degrees of freedom."""

from __future__ import annotations

import math
from functools import lru_cache


def central_probability(angle: float, df: int) -> float:
    """Return ``P(|T| <= sqrt(df) * tan(angle))``, by Abramowitz and Stegun 26.7.3 and 26.7.4."""
    sine = math.sin(angle)
    cosine = math.cos(angle)
    if df % 2:
        terms = []
        term = cosine
        for k in range(1, (df - 1) // 2 + 1):
            terms.append(term)
            term *= cosine * cosine * (2 * k) / (2 * k + 1)
        return 2.0 / math.pi * (angle + sine * math.fsum(terms))
    terms = []
    term = 1.0
    for k in range(1, df // 2 + 1):
        terms.append(term)
        term *= cosine * cosine * (2 * k - 1) / (2 * k)
    return sine * math.fsum(terms)


@lru_cache(maxsize=4096)
def two_sided_quantile(confidence: float, df: int) -> float:
    """Return ``t`` with ``P(|T| <= t) = confidence``, for ``0 < confidence < 1`` and ``df >= 1``.

    The angle ``atan(t / sqrt(df))`` is bisected until two adjacent floating-point numbers enclose
    it.
    """
    low = 0.0
    high = math.pi / 2
    while low < (middle := (low + high) / 2) < high:
        if central_probability(middle, df) < confidence:
            low = middle
        else:
            high = middle
    return math.sqrt(df) * math.tan(high)
