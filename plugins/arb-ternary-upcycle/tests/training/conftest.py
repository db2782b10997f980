"""A tiny trained teacher, and runs of a student of its sizes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import frozen

from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_text.models.decoder import Decoder
from arb_ternary_train.config import RunConfig
from arb_ternary_train.context import TrainingContext
from arb_ternary_train.directory import RunDirectory
from arb_ternary_train.loading import load_config
from arb_ternary_train.progress import LogFile, Silent
from arb_ternary_train.report import RunReport
from arb_ternary_train.runner import RunRequest, train
from arb_ternary_upcycle.float_model import FloatModel, float_config

CONFIG = """
name: tiny
seed: 3
threads: 1
data: {{name: text, path: {text}, tokenizer: bytes}}
model:
  name: decoder
  architecture: llama
  width: 32
  layers: 2
  heads: 4
  kv_heads: 2
  feed_forward: 48
  max_length: 32
  group_size: 32
  float_parts: [norms]
optimizer:
  name: split
  ternary: {{name: scaled_votes, lr: 0.05}}
  float: adamw
checkpoint: {{every: 4, keep: 40}}
phases:
  - {{name: blockwise, steps: 6, batch_size: 2, block_size: 16, eval_every: 0, teacher: {teacher}}}
"""


def make_text(path: Path) -> None:
    generator = random.Random(0)
    words = ["to", "be", "or", "not", "that", "is", "the", "question"]
    path.write_text(" ".join(generator.choice(words) for _ in range(900)))


def make_teacher(text: Path, steps: int = 60) -> Decoder:
    """A float decoder of the tiny config's sizes, trained for some steps on the text."""
    torch.manual_seed(0)
    config = DecoderConfig(
        architecture="llama",
        width=32,
        layers=2,
        heads=4,
        kv_heads=2,
        feed_forward=48,
        max_length=32,
    )
    model = Decoder(float_config(config), 256)
    ids = torch.tensor(list(text.read_bytes()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        starts = torch.randint(0, len(ids) // 2, (8,))
        window = torch.stack([ids[start : start + 25] for start in starts])
        loss = torch.nn.functional.cross_entropy(
            model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten()
        )
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return model.eval().requires_grad_(False)


class NoteKeeper(Silent):
    """A reporter that keeps the notes."""

    notes: list[str] = []  # noqa: RUF012  # cleared before each run

    def note(self, text: str) -> None:
        self.notes.append(text)
        super().note(text)


@frozen
class Tiny:
    """Writes the tiny config and runs it."""

    folder: Path
    teacher: Decoder

    @property
    def file(self) -> Path:
        return self.folder / "tiny.yaml"

    def config(self, *overrides: str) -> RunConfig:
        return load_config(self.file, overrides).config

    def run(self, name: str, *overrides: str, **request: object) -> tuple[RunDirectory, RunReport]:
        directory = RunDirectory(self.folder / name)
        options = {"directory": directory.path, "reporter": self._reporter, **request}
        return directory, train(self.config(*overrides), RunRequest(**options))  # type: ignore[arg-type]

    @staticmethod
    def _reporter(log_file: LogFile) -> NoteKeeper:
        NoteKeeper.notes.clear()
        return NoteKeeper(log_file)

    @property
    def notes(self) -> list[str]:
        return NoteKeeper.notes

    def phase(self, name: str, **options: Any) -> str:
        """Return an override that gives the run a single phase."""
        given: Mapping[str, Any] = {
            "name": name,
            "batch_size": 2,
            "block_size": 16,
            "eval_every": 0,
            **options,
        }
        given = {"teacher": self.folder / "teacher", **given} if name != "standard" else given
        return (
            "phases=[" + "{" + ", ".join(f"{key}: {value}" for key, value in given.items()) + "}]"
        )


@pytest.fixture(scope="session")
def taught(
    tmp_path_factory: pytest.TempPathFactory, write_stage: Callable[..., FloatModel]
) -> tuple[Path, Decoder]:
    """A folder with a text and a teacher of it, and the teacher."""
    folder = tmp_path_factory.mktemp("taught")
    make_text(folder / "text.txt")
    teacher = make_teacher(folder / "text.txt")
    write_stage(folder / "teacher", teacher)
    return folder, teacher


@pytest.fixture
def tiny(tmp_path: Path, taught: tuple[Path, Decoder]) -> Tiny:
    folder, teacher = taught
    (tmp_path / "teacher").symlink_to(folder / "teacher")
    made = Tiny(tmp_path, teacher)
    made.file.write_text(CONFIG.format(text=folder / "text.txt", teacher=tmp_path / "teacher"))
    return made


@pytest.fixture
def stop_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Make runs stop after a step of theirs; 0 = no longer."""
    record_step = TrainingContext.record_step
    at = [0]

    def recorded(self: TrainingContext, *arguments: Any, **options: Any) -> None:
        record_step(self, *arguments, **options)
        if self.step == at[0]:
            self.request_stop("a test")

    monkeypatch.setattr(TrainingContext, "record_step", recorded)

    def set_step(step: int) -> None:
        at[0] = step

    return set_step


@pytest.fixture
def files_in() -> Callable[..., dict[str, bytes]]:
    """Read every file in a folder that matches a pattern, by its path in the folder."""

    def read(
        folder: Path, patterns: Iterable[str] = ("metrics.jsonl", "checkpoints/*/*")
    ) -> dict[str, bytes]:
        found = [path for pattern in patterns for path in folder.glob(pattern) if path.is_file()]
        return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(found)}

    return read
