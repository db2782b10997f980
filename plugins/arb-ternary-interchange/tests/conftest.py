"""Small decoders, tiny runs, models that are read back, and files that are changed at random."""

from __future__ import annotations

import random
import time
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import define, evolve, frozen

from arb_ternary_interchange.protocols import ImportedModel
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_text.models.decoder import Decoder
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

SIZES: Mapping[str, Any] = {
    "width": 64,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "feed_forward": 96,
    "max_length": 32,
}


@frozen
class Tiny:
    """Writes the tiny config and runs it: a decoder of a few thousand weights on a few kilobytes of
    text.
    """

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


@pytest.fixture(scope="session")
def make_decoder() -> Callable[..., Decoder]:
    """Make a decoder with random weights; keyword arguments are options."""

    def make(
        architecture: str | None = None,
        vocabulary_size: int = 256,
        seed: int = 0,
        **options: Any,
    ) -> Decoder:
        torch.manual_seed(seed)
        config = DecoderConfig(architecture=architecture, **{**SIZES, **options})  # type: ignore[arg-type]
        return Decoder(config, vocabulary_size).eval()

    return make


@pytest.fixture(scope="session")
def built() -> Callable[..., Decoder]:
    """Build and fill the decoder that an importer has read; keyword arguments change its
    options.
    """

    def build(imported: ImportedModel, **changes: Any) -> Decoder:
        options = {name: value for name, value in imported.model.items() if name != "name"}
        model = Decoder(DecoderConfig(**{**options, **changes}), imported.vocabulary_size)
        imported.fill(model)
        return model.eval()

    return build


@pytest.fixture(scope="session")
def as_float() -> Callable[[Decoder], Decoder]:
    """Copy a decoder, with activations that are not rounded to int8."""

    def copy(model: Decoder) -> Decoder:
        other = Decoder(evolve(model.config, activations="float"), model.vocabulary_size)
        other.load_state_dict(model.state_dict())
        return other.eval()

    return copy


@define
class Figures:
    """Counts of what happened to changed files."""

    accepted: int = 0
    refused: int = 0
    slowest: float = 0.0
    peak: int = 0


@pytest.fixture(scope="session")
def fuzz() -> Callable[..., Figures]:
    """Use changed files: one may be refused or accepted, and may take no more than twice its size
    in memory.
    """
    # What Python, a model's modules and an error's text take, however small the files are.
    fixed = 1 << 20

    def run(change: Callable[[], int], use: Callable[[], bool], count: int) -> Figures:
        """``change`` writes files and returns their size; ``use`` says whether they were
        accepted. The memory of every tenth use is traced, which is slow.
        """
        figures = Figures()
        for number in range(count):
            size = change()
            traced = number % 10 == 0
            if traced:
                tracemalloc.start()
            start = time.process_time()
            if use():
                figures.accepted += 1
            else:
                figures.refused += 1
            figures.slowest = max(figures.slowest, time.process_time() - start)
            if traced:
                peak = tracemalloc.get_traced_memory()[1]
                tracemalloc.stop()
                figures.peak = max(figures.peak, peak)
                assert peak <= 2 * size + fixed, (peak, size)
        return figures

    return run
