"""A run on digits that takes a second: a diffusion transformer of a few thousand weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import sklearn.datasets  # noqa: F401  # changes environment variables, which no test may do
from attrs import frozen

from arb_ternary_train.directory import RunDirectory
from arb_ternary_train.loading import load_config
from arb_ternary_train.progress import Silent
from arb_ternary_train.report import RunReport
from arb_ternary_train.runner import RunRequest, train

CONFIG = """
name: images
seed: 3
data: digits
model: {name: dit, width: 16, layers: 1, heads: 2}
masking: noise
optimizer: {name: scaled_votes, lr: 0.3}
checkpoint: {every: 2, keep: 4}
phases:
  - {name: standard, steps: 4, batch_size: 8, eval_every: 2, eval_batches: 2}
"""


@frozen
class ImageRuns:
    """Writes the config into a folder and runs it there."""

    folder: Path

    def run(self, name: str, *overrides: str, **request: object) -> tuple[RunDirectory, RunReport]:
        file = self.folder / "images.yaml"
        file.write_text(CONFIG)
        directory = RunDirectory(self.folder / name)
        options = {"directory": directory.path, "reporter": Silent, **request}
        return directory, train(load_config(file, overrides).config, RunRequest(**options))  # type: ignore[arg-type]


@pytest.fixture
def images(tmp_path: Path) -> ImageRuns:
    return ImageRuns(tmp_path)


@pytest.fixture
def files_in() -> Callable[[Path, Iterable[str]], dict[str, bytes]]:
    """Return a function that reads the files of a folder that match patterns, by their paths."""

    def read(
        folder: Path, patterns: Iterable[str] = ("metrics.jsonl", "checkpoints/step*/*")
    ) -> dict[str, bytes]:
        found = [path for pattern in patterns for path in folder.glob(pattern) if path.is_file()]
        return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(found)}

    return read
