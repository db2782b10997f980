"""A run that takes a fraction of a second, a writer that can fail, and libraries without a key."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve, frozen

from arb_ternary_testing.interruption import Crash, interruption
from arb_ternary_track.config import TrackerConfig
from arb_ternary_track.points import Point, TrackedRun
from arb_ternary_track.tracker import Tracker
from arb_ternary_track.writer import Writer
from arb_ternary_train import build
from arb_ternary_train.config import RunConfig
from arb_ternary_train.directory import RunDirectory
from arb_ternary_train.loading import load_config
from arb_ternary_train.progress import Silent
from arb_ternary_train.report import RunReport
from arb_ternary_train.runner import RunRequest, train

CONFIG = """
name: tiny
seed: 3
data: {{name: text, path: {text}, tokenizer: characters}}
model:
  {{name: decoder, width: 16, layers: 1, heads: 2, max_length: 16, group_size: 32,
      float_parts: [norms, embedding]}}
optimizer:
  name: split
  ternary: {{name: sign_votes, accum_threshold: 2, e_accum_threshold: 4}}
  float: adamw
checkpoint: {{every: 3, keep: 9}}
phases:
  - name: standard
    steps: 8
    batch_size: 2
    block_size: 8
    lr: 0.01
    warmup_steps: 2
    eval_every: 4
    eval_batches: 2
"""


@frozen
class Tiny:
    """Writes the tiny config and runs it."""

    folder: Path

    @property
    def file(self) -> Path:
        return self.folder / "tiny.yaml"

    def config(self, *overrides: str) -> RunConfig:
        return load_config(self.file, overrides).config

    def run(self, name: str, *overrides: str, **request: Any) -> tuple[RunDirectory, RunReport]:
        directory = RunDirectory(self.folder / name)
        options = {"directory": directory.path, "reporter": Silent, **request}
        return directory, train(self.config(*overrides), RunRequest(**options))

    def crash(self, name: str, *overrides: str, step: int, **request: Any) -> None:
        """Start a run that ends without notice after a step."""
        config = self.config(*overrides)
        crashing = evolve(config, trackers=(*config.trackers, interruption(step, "crash")))
        options = {"directory": self.folder / name, "reporter": Silent, **request}
        with pytest.raises(Crash):
            train(crashing, RunRequest(**options))


@pytest.fixture
def tiny(tmp_path: Path) -> Tiny:
    generator = random.Random(0)
    words = ["to", "be", "or", "not", "that", "is", "the", "question"]
    text = tmp_path / "text.txt"
    text.write_text(" ".join(generator.choice(words) for _ in range(900)))
    made = Tiny(tmp_path)
    made.file.write_text(CONFIG.format(text=text))
    return made


class Recorder(Writer):
    """Keeps what it gets, and fails or hangs where it is told to.

    Args:
        place: ``open``, ``write`` or ``close``; None = nowhere.
        error: raised there; None = hang.
    """

    def __init__(self, place: str | None = None, error: Exception | None = None) -> None:
        self.key = "recorder"
        self.place = place
        self.error = error
        self.reached = threading.Event()
        self.released = threading.Event()
        self.runs: list[TrackedRun] = []
        self.points: list[Point] = []
        self.threads: set[str] = set()

    def _reach(self, place: str) -> None:
        self.threads.add(threading.current_thread().name)
        if place != self.place:
            return
        if self.error is not None:
            raise self.error
        self.reached.set()
        self.released.wait(60)

    def open(self, run: TrackedRun) -> None:
        self.runs.append(run)
        self._reach("open")

    def write(self, points: Sequence[Point]) -> None:
        self._reach("write")
        self.points.extend(points)

    def close(self, failed: bool) -> None:
        self._reach("close")


@pytest.fixture
def recorder() -> type[Recorder]:
    return Recorder


@pytest.fixture
def track(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let runs have a tracker that writes with the given writer, after other observers."""

    def use(writer: Writer, *observers: object, **options: Any) -> None:
        def observe(config: RunConfig) -> build.RunObservers:
            tracker = Tracker("test", TrackerConfig(**{"layers_every": 3, **options}), writer)
            others = {f"other{index}": other for index, other in enumerate(observers)}
            return build.RunObservers({**others, "test": tracker})

        monkeypatch.setattr(build, "build_observers", observe)

    return use


@pytest.fixture
def files_in() -> Callable[..., dict[str, bytes]]:
    """The content of every file of a run that must be the same with and without a tracker."""

    def read(
        folder: Path, patterns: Iterable[str] = ("metrics.jsonl", "checkpoints/*/*")
    ) -> dict[str, bytes]:
        found = [path for pattern in patterns for path in folder.glob(pattern) if path.is_file()]
        assert found
        return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(found)}

    return read


@pytest.fixture(autouse=True)
def no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the libraries find no key and no wish to be online."""
    for name in ("WANDB_MODE", "WANDB_API_KEY", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "wandb-config"))
