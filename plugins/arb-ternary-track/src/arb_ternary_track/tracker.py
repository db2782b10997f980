"""The observer that makes the points of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from time import time
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from arb_ternary import hookimpl
from arb_ternary.config.fields import to_plain
from arb_ternary.errors import ConfigError
from arb_ternary_track.config import TrackerConfig
from arb_ternary_track.delivery import Delivery
from arb_ternary_track.layers import LayerMeter
from arb_ternary_track.points import Point, TrackedRun
from arb_ternary_track.writer import Writer

if TYPE_CHECKING:
    from arb_ternary_train.context import TrainingContext

#: Numbers of a record that are not measurements.
_NOT_TRACKED: Final = frozenset({"step", "time"})
#: Files of the trackers that are at work in this process.
_AT_WORK: Final[set[Path]] = set()


class Tracker:
    """Makes points of what a run reports. Whatever becomes of them, the run is the same.

    It stores nothing in checkpoints. Its progress is in ``trackers/`` of the run directory.

    Args:
        name: name of the tracker in notes.
        config: its options.
        writer: writes the points.
    """

    def __init__(self, name: str, config: TrackerConfig, writer: Writer) -> None:
        self.name = name
        self.config = config
        self._writer = writer
        self._layers = LayerMeter(config.layers_every)
        self._delivery: Delivery | None = None
        self._file = Path()
        self._said = False

    @hookimpl
    def arb_run_start(self, context: TrainingContext) -> None:
        file = context.directory / "trackers" / f"{quote(self._writer.key, safe=' ')}.json"
        if file.resolve() in _AT_WORK:
            raise ConfigError(
                f"trackers: two of them write to the same place: {self._writer.key}",
                "Remove one, or give it a project or folder of its own.",
            )
        self._file = file.resolve()
        _AT_WORK.add(self._file)
        run = TrackedRun(
            id="",
            name=context.directory.resolve().name,
            directory=context.directory,
            step=context.step,
            resumed=False,
            config=to_plain(context.config, given=False),
        )
        self._delivery = Delivery(self._writer, run, file, self.config.queue)
        self._layers.prepare(context, context.step)

    @hookimpl
    def arb_step_end(self, context: TrainingContext, step: int, metrics: Mapping[str, Any]) -> None:
        delivery = self._delivery
        assert delivery is not None
        delivery.offer(lambda: _scalars("train", step, metrics))
        delivery.offer(lambda: self._measure_layers(context, step))
        if delivery.error is not None and not self._said:
            self._said = True
            context.note(f"tracker {self.name}: {delivery.error}; the run goes on without it")

    @hookimpl
    def arb_eval_end(self, context: TrainingContext, step: int, metrics: Mapping[str, Any]) -> None:
        delivery = self._delivery
        assert delivery is not None
        delivery.offer(lambda: _scalars("validation", step, metrics))

    @hookimpl
    def arb_run_end(self, context: TrainingContext, status: str) -> None:
        delivery = self._delivery
        if delivery is None:
            return
        self._delivery = None
        _AT_WORK.discard(self._file)
        if status == "finished":
            delivery.offer(lambda: _report(context))
        in_time = delivery.close(self.config.wait, failed=status == "failed")
        if delivery.dropped or not in_time:
            why = delivery.error
            if not in_time:
                why = f"it did not finish within {self.config.wait} s"
            context.note(
                f"tracker {self.name}: {delivery.dropped:,} of {delivery.offered:,} points are not "
                f"written: {why or 'the queue was full'}"
            )
        elif delivery.error is not None:
            context.note(f"tracker {self.name}: {delivery.error}")

    def _measure_layers(self, context: TrainingContext, step: int) -> Point | None:
        measured = self._layers.measure(context, step)
        self._layers.prepare(context, step)
        if measured is None:
            return None
        scalars, histograms = measured
        return Point(kind="layers", step=step, time=time(), scalars=scalars, histograms=histograms)


def _scalars(kind: str, step: int, metrics: Mapping[str, Any]) -> Point:
    """Return the numbers of a record as a point."""
    numbers: dict[str, float] = {}
    for name, value in metrics.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and name not in _NOT_TRACKED:
            numbers[f"{kind}/{name}"] = value
    return Point(kind=kind, step=step, time=metrics.get("time", time()), scalars=numbers)


def _report(context: TrainingContext) -> Point:
    """Return the point of a finished run."""
    report = json.loads(context.files.result_file.read_text(encoding="utf-8"))
    return Point(kind="report", step=context.step, time=time(), report=report)
