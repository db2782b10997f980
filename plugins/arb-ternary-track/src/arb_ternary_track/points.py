"""Points that a tracker is given: plain values that nothing changes any more."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from attrs import field, frozen
from numpy.typing import NDArray


@frozen(eq=False)
class Histogram:
    """How often each integer occurs.

    Attributes:
        first: the smallest integer that occurs.
        counts: how often ``first``, ``first + 1``, ... occur, up to the largest that occurs; int64.
    """

    first: int
    counts: NDArray[np.int64]

    @property
    def values(self) -> NDArray[np.int64]:
        """The integers that are counted."""
        return np.arange(self.first, self.first + len(self.counts))

    @property
    def edges(self) -> NDArray[np.float64]:
        """The edges of the bins, one more than there are bins."""
        last = self.first + len(self.counts)
        return np.arange(self.first, last + 1, dtype=np.float64) - 0.5


@frozen(kw_only=True, eq=False)
class Point:
    """Numbers of one moment of a run.

    Attributes:
        kind: ``train``, ``validation``, ``layers`` or ``report``. There is one point per kind and
            step.
        step: optimizer steps of the run.
        time: seconds since 1970.
        scalars: numbers by name.
        histograms: histograms by name.
        report: the report of the finished run, as in ``result.json``; None for other points.
    """

    kind: str
    step: int
    time: float
    scalars: Mapping[str, float] = field(factory=dict)
    histograms: Mapping[str, Histogram] = field(factory=dict)
    report: Mapping[str, Any] | None = None


@frozen(kw_only=True, eq=False)
class TrackedRun:
    """The run that is tracked.

    Attributes:
        id: its name in the tracker, the same after a resume and like that of no other run.
        name: name of the run directory.
        directory: the run directory.
        step: optimizer steps that it has taken.
        resumed: whether the tracker has points of it.
        config: the resolved config.
    """

    id: str
    name: str
    directory: Path
    step: int
    resumed: bool
    config: Mapping[str, Any]
