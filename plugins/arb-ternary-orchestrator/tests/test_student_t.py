"""Against scipy's distribution."""

from __future__ import annotations

import pytest
from scipy import stats

from arb_ternary_orchestrator.student_t import upper_quantile, upper_tail

DEGREES = (1.0, 1.5, 2.0, 3.7, 9.0, 49.5, 199.0, 5000.0)


@pytest.mark.parametrize("df", DEGREES)
def test_the_tail_is_that_of_scipy(df: float) -> None:
    for t in (0.0, 0.1, 1.0, 3.0, 12.0, 400.0):
        assert upper_tail(t, df) == pytest.approx(stats.t.sf(t, df), rel=1e-10, abs=1e-290)


@pytest.mark.parametrize("df", DEGREES)
def test_the_quantile_is_that_of_scipy(df: float) -> None:
    for k in (0.5, 1.0, 3.0, 4.0, 6.0):
        tail = float(stats.norm.sf(k))
        assert upper_quantile(tail, df) == pytest.approx(stats.t.isf(tail, df), rel=1e-9)
