"""The upper tail of Student's t distribution, for any positive number of degrees of freedom."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Final

#: Terms after which the continued fraction is given up. It needs about sqrt(df).
_MOST_TERMS: Final = 10_000
_TINY: Final = 1e-300


def upper_tail(t: float, df: float) -> float:
    """``P(T > t)`` for ``t >= 0``: half the incomplete beta function ``I_x(df / 2, 1 / 2)``, ``x =
    df / (df + t^2)``.

    Abramowitz and Stegun 26.7.1 and 26.5.8.
    """
    x = df / (df + t * t)
    a = df / 2
    b = 0.5
    if x > (a + 1) / (a + b + 2):  # the fraction converges fast on the other side
        return 0.5 - 0.5 * _incomplete_beta(b, a, t * t / (df + t * t))
    return 0.5 * _incomplete_beta(a, b, x)


@lru_cache(maxsize=16_384)
def upper_quantile(tail: float, df: float) -> float:
    """The ``t`` with ``P(T > t) = tail``, for ``0 < tail < 1/2``.

    Newton's method on the logarithm of the tail as a function of the logarithm of t, which is
    concave, so that it converges from anywhere.
    """
    t = math.sqrt(-2 * math.log(tail))
    constant = math.lgamma((df + 1) / 2) - math.lgamma(df / 2) - 0.5 * math.log(df * math.pi)
    for _ in range(100):
        beyond = upper_tail(t, df)
        density = math.exp(constant - (df + 1) / 2 * math.log1p(t * t / df))
        move = math.log(beyond / tail) * beyond / (t * density)
        t *= math.exp(move)
        if abs(move) < 1e-14:
            break
    return t


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """``I_x(a, b)`` as a continued fraction (Abramowitz and Stegun 26.5.8), evaluated as Lentz
    does.
    """
    if x <= 0:
        return 0.0
    front = (
        math.exp(
            math.lgamma(a + b)
            - math.lgamma(a)
            - math.lgamma(b)
            + a * math.log(x)
            + b * math.log1p(-x)
        )
        / a
    )
    c = 1.0
    d = 1.0 / _away_from_zero(1 - (a + b) * x / (a + 1))
    value = d
    for m in range(1, _MOST_TERMS):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for numerator in (even, odd):
            d = 1.0 / _away_from_zero(1 + numerator * d)
            c = _away_from_zero(1 + numerator / c)
            value *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return front * value


def _away_from_zero(value: float) -> float:
    return value if abs(value) > _TINY else _TINY
