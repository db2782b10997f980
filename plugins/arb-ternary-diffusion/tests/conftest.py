"""A run on digits that takes a second: a transformer of a few thousand weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import sklearn.datasets  # noqa: F401  # it sets variables of OpenMP, which no test is to be blamed for
from attrs import frozen

from arb_ternary_train.directory import RunDirectory
from arb_ternary_train.loading import load_config
from arb_ternary_train.progress import Silent
from arb_ternary_train.report import RunReport
from arb_ternary_train.runner import RunRequest, train

CONFIG = """
name: pictures
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
class Pictures:
    """Writes the config and runs it."""

    folder: Path

    def run(self, name: str, *overrides: str, **request: object) -> tuple[RunDirectory, RunReport]:
        file = self.folder / "pictures.yaml"
        file.write_text(CONFIG)
        directory = RunDirectory(self.folder / name)
        options = {"directory": directory.path, "reporter": Silent, **request}
        return directory, train(load_config(file, overrides).config, RunRequest(**options))  # type: ignore[arg-type]


@pytest.fixture
def pictures(tmp_path: Path) -> Pictures:
    return Pictures(tmp_path)


@pytest.fixture
def files_in() -> Callable[[Path, Iterable[str]], dict[str, bytes]]:
    """The content of every file under a folder that matches a pattern, by its path in the
    folder.
    """

    def read(
        folder: Path, patterns: Iterable[str] = ("metrics.jsonl", "checkpoints/step*/*")
    ) -> dict[str, bytes]:
        found = [path for pattern in patterns for path in folder.glob(pattern) if path.is_file()]
        return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(found)}

    return read
