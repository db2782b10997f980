"""Event files for TensorBoard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch.utils.tensorboard import SummaryWriter

from arb_ternary.config.yaml_document import dump_yaml
from arb_ternary_track.config import TensorboardConfig
from arb_ternary_track.points import Histogram, Point, TrackedRun
from arb_ternary_track.writer import Writer


class TensorboardWriter(Writer):
    """Writes to event files. TensorBoard hides what an earlier file has after the step of resume.

    It holds numbers as float32.
    """

    rewinds: ClassVar[bool] = True

    def __init__(self, config: TensorboardConfig) -> None:
        self.key = f"tensorboard {config.folder}"
        self._folder = config.folder
        self._events: Any = None

    def open(self, run: TrackedRun) -> None:
        hidden = run.step + 1 if run.resumed else None
        folder = run.directory / self._folder
        self._events = SummaryWriter(str(folder), purge_step=hidden)
        if not run.resumed:
            self._add_text("config", run.config, run.step)

    def write(self, points: Sequence[Point]) -> None:
        for point in points:
            for name, value in point.scalars.items():
                self._events.add_scalar(name, value, point.step, walltime=point.time)
            for name, histogram in point.histograms.items():
                self._add_histogram(name, histogram, point)
            if point.report is not None:
                self._add_text("report", point.report, point.step)
        # It raises if the disk refuses.
        self._events.flush()

    def close(self, failed: bool) -> None:
        self._events.close()

    def _add_histogram(self, name: str, histogram: Histogram, point: Point) -> None:
        values = histogram.values
        counts = histogram.counts
        self._events.add_histogram_raw(
            name,
            min=int(values[0]),
            max=int(values[-1]),
            num=int(counts.sum()),
            sum=int((values * counts).sum()),
            sum_squares=int((values**2 * counts).sum()),
            bucket_limits=histogram.edges[1:].tolist(),
            bucket_counts=counts.tolist(),
            global_step=point.step,
            walltime=point.time,
        )

    def _add_text(self, name: str, content: Any, step: int) -> None:
        self._events.add_text(name, f"```yaml\n{dump_yaml(content)}```", step)
