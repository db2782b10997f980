"""Whatever a tracker does, the files of the run are the same, and the log says what is missing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from arb_ternary import hookimpl
from arb_ternary.errors import ConfigError
from arb_ternary_track.delivery import Delivery
from arb_ternary_track.points import Point, TrackedRun
from arb_test_support.ranks import on_ranks


class Killed(BaseException):
    """Stands for the death of the process."""


class KillAfter:
    def __init__(self, step: int) -> None:
        self.step = step

    @hookimpl(trylast=True)
    def arb_step_end(self, step: int) -> None:
        if step == self.step:
            raise Killed


@pytest.fixture
def hanging(recorder: Any) -> Iterator[Any]:
    writer = recorder("write")
    yield writer
    writer.released.set()


@pytest.fixture
def plain(tiny: Any, files_in: Any) -> dict[str, bytes]:
    """The files of a run without a tracker."""
    run, _ = tiny.run("plain")
    files: dict[str, bytes] = files_in(run.path)
    return files


def notes(run: Any) -> list[str]:
    """The lines of the log that speak of the tracker, without the time."""
    lines = run.log_file.read_text().splitlines()
    return [line[20:] for line in lines if "tracker test" in line]


def test_a_tracker_gets_every_point_once_and_the_run_is_the_same(
    tiny: Any, track: Any, recorder: Any, plain: dict[str, bytes], files_in: Any
) -> None:
    writer = recorder()
    track(writer, wait=60)
    run, _ = tiny.run("run")
    assert files_in(run.path) == plain
    assert notes(run) == []
    kinds = [(point.kind, point.step) for point in writer.points]
    assert sorted(kinds) == sorted(
        [("train", step) for step in range(1, 9)]
        + [("validation", 4), ("validation", 8), ("layers", 3), ("layers", 6), ("report", 8)]
    )
    assert writer.threads == {"tracker recorder"}


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("open", "13 of 13 points are not written: OSError: no room"),
        ("write", "13 of 13 points are not written: OSError: no room"),
        ("close", "OSError: no room"),
    ],
)
def test_a_tracker_that_raises_changes_nothing(
    tiny: Any, track: Any, recorder: Any, plain: Any, files_in: Any, place: str, said: str
) -> None:
    track(recorder(place, OSError("no room")), wait=60)
    run, _ = tiny.run("run")
    assert files_in(run.path) == plain
    assert notes(run)[-1] == f"tracker test: {said}"
    # once while it runs, if there is a step after the error, and once at the end
    early = ["tracker test: OSError: no room; the run goes on without it"]
    assert notes(run)[:-1] in ([], early)


def test_a_tracker_that_hangs_changes_nothing(
    tiny: Any, track: Any, plain: dict[str, bytes], files_in: Any, hanging: Any
) -> None:
    track(hanging, wait=1)
    run, _ = tiny.run("run")
    assert not hanging.released.is_set()
    assert files_in(run.path) == plain
    assert notes(run) == [
        "tracker test: 13 of 13 points are not written: it did not finish within 1 s"
    ]


@pytest.mark.parametrize("place", ["open", "write"])
def test_the_end_does_not_wait_for_a_tracker_that_hangs_already(
    hanging: Any, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging.place = place
    run = TrackedRun(id="", name="run", directory=tmp_path, step=0, resumed=False, config={})
    delivery = Delivery(hanging, run, tmp_path / "progress.json", capacity=9)
    delivery.offer(lambda: Point(kind="train", step=1, time=0.0, scalars={"loss": 1.0}))
    assert hanging.reached.wait(60)
    # Three times the wait have passed since the call began. The test itself has less time.
    hour = 3_600
    now = time.monotonic()
    later = SimpleNamespace(monotonic=lambda: now + 3 * hour + 60)
    monkeypatch.setattr("arb_ternary_track.delivery.time", later)
    assert not delivery.close(hour, failed=False)
    assert delivery.dropped == 1
    assert not hanging.released.is_set()


def test_a_full_queue_drops_points(
    tiny: Any, track: Any, plain: dict[str, bytes], files_in: Any, hanging: Any
) -> None:
    class Release:
        @hookimpl
        def arb_run_end(self, status: str) -> None:
            hanging.released.set()

    hanging.place = "open"
    track(hanging, Release(), queue=2, wait=60)
    run, _ = tiny.run("run")
    assert files_in(run.path) == plain
    # the queue holds the first two steps, and perhaps the report, for which there is room again
    assert [(point.kind, point.step) for point in hanging.points[:2]] == [
        ("train", 1),
        ("train", 2),
    ]
    dropped = 13 - len(hanging.points)
    assert dropped in (10, 11)
    assert notes(run) == [
        f"tracker test: {dropped} of 13 points are not written: the queue was full"
    ]


def test_a_resumed_run_is_the_same_one_without_repetition(
    tiny: Any, track: Any, recorder: Any
) -> None:
    first, second = recorder(), recorder()
    track(first, KillAfter(7), wait=60)
    with pytest.raises(Killed):
        tiny.run("run")
    track(second, wait=60)
    tiny.run("run", resume=str(tiny.folder / "run/checkpoints/step-00000003"))
    assert [run.step for run in first.runs + second.runs] == [0, 3]
    assert [run.resumed for run in first.runs + second.runs] == [False, True]
    assert len({run.id for run in first.runs + second.runs}) == 1
    steps = [
        [point.step for point in each.points if point.kind == "train"] for each in (first, second)
    ]
    assert steps == [[1, 2, 3, 4, 5, 6, 7], [8]]


def test_a_writer_that_rewinds_gets_the_steps_again(tiny: Any, track: Any, recorder: Any) -> None:
    class Rewinding(recorder):
        rewinds = True

    track(Rewinding(), KillAfter(7), wait=60)
    with pytest.raises(Killed):
        tiny.run("run")
    second = Rewinding()
    track(second, wait=60)
    tiny.run("run", resume=str(tiny.folder / "run/checkpoints/step-00000003"))
    assert [p.step for p in second.points if p.kind == "train"] == [4, 5, 6, 7, 8]
    assert [p.step for p in second.points if p.kind == "layers"] == [6]


def test_two_trackers_of_one_place_are_refused(tiny: Any) -> None:
    pytest.importorskip("tensorboard")
    with pytest.raises(ConfigError, match="two of them write to the same place: tensorboard"):
        tiny.run("run", "trackers=[tensorboard, tensorboard]")


def test_only_the_main_process_tracks(tiny: Any, track: Any, recorder: Any) -> None:
    writer = recorder()
    track(writer, wait=60)
    assert on_ranks(2, runs_of, tiny, writer) == [1, 0]


def runs_of(world: Any, tiny: Any, writer: Any) -> int:
    tiny.run("run", "phases.0.gradient_accumulation_steps=2", world=world)
    return len(writer.runs)
