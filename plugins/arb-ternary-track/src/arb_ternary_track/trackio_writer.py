"""Runs in trackio."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import trackio
from trackio.sqlite_storage import SQLiteStorage

from arb_ternary.config.yaml_document import dump_yaml
from arb_ternary_track.config import TrackioConfig
from arb_ternary_track.points import Point, TrackedRun
from arb_ternary_track.variables import TRACKIO
from arb_ternary_track.writer import Writer


class TrackioWriter(Writer):
    """Writes to the database of trackio, or to the Space or server that its variables name.

    The database is written directly: a run of trackio does so in a thread of its own, which hides
    errors.
    """

    def __init__(self, config: TrackioConfig) -> None:
        self.key = f"trackio {config.project}"
        self._config = config
        self._id = ""
        self._name = ""
        self._run_config: dict[str, Any] | None = None
        self._remote: Any = None

    def open(self, run: TrackedRun) -> None:
        self._id = run.id
        self._name = self._config.run_name or run.name
        self._run_config = dict(run.config)
        if any(variable.read() for variable in TRACKIO):
            # trackio finds a run by its name.
            self._remote = trackio.init(
                project=self._config.project,
                name=f"{self._name}-{run.id}",
                config=self._run_config,
                resume="allow",
                embed=False,
            )

    def write(self, points: Sequence[Point]) -> None:
        if self._remote is not None:
            for point in points:
                self._remote.log(_row(point), step=point.step)
            return
        SQLiteStorage.bulk_log(
            project=self._config.project,
            run=self._name,
            run_id=self._id,
            metrics_list=[_row(point) for point in points],
            steps=[point.step for point in points],
            timestamps=[datetime.fromtimestamp(point.time, UTC).isoformat() for point in points],
            log_ids=[f"{self._id} {point.kind} {point.step}" for point in points],
            config=self._run_config,
        )
        self._run_config = None

    def close(self, failed: bool) -> None:
        if self._remote is not None:
            self._remote.finish()


def _row(point: Point) -> dict[str, Any]:
    """Return the values of a point as trackio stores them."""
    row: dict[str, Any] = dict(point.scalars)
    for name, histogram in point.histograms.items():
        bins = (histogram.counts, histogram.edges)
        row[name] = trackio.Histogram(np_histogram=bins)._to_dict()
    if point.report is not None:
        text = f"```yaml\n{dump_yaml(dict(point.report))}```"
        row["report"] = trackio.Markdown(text)._to_dict()
    return row
