"""A run that takes a fraction of a second: a decoder of a few thousand weights on a few kilobytes
of text.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from attrs import frozen

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
checkpoint: {{every: 3, keep: 2}}
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

    def run(self, name: str, *overrides: str, **request: object) -> tuple[RunDirectory, RunReport]:
        directory = RunDirectory(self.folder / name)
        options = {"directory": directory.path, "reporter": Silent, **request}
        return directory, train(self.config(*overrides), RunRequest(**options))  # type: ignore[arg-type]


@pytest.fixture
def tiny(tmp_path: Path) -> Tiny:
    generator = random.Random(0)
    words = ["to", "be", "or", "not", "that", "is", "the", "question"]
    text = tmp_path / "text.txt"
    text.write_text(" ".join(generator.choice(words) for _ in range(900)))
    made = Tiny(tmp_path)
    made.file.write_text(CONFIG.format(text=text))
    return made
