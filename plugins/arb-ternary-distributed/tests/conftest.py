"""Two ranks, started once for several files of tests. Each file defines ``on_rank``."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch._dynamo  # torch's optimizers import it: here once, and not on every rank  # noqa: F401

from arb_ternary_train.config import RunConfig
from arb_ternary_train.loading import load_config
from arb_ternary_train.world import World
from arb_test_support.ranks import on_ranks

TINY = """
data: {{name: text, path: {text}, tokenizer: characters}}
model:
  {{name: decoder, width: 16, layers: 1, heads: 2, max_length: 16, group_size: 32,
      float_parts: [norms, embedding]}}
optimizer:
  name: split
  ternary: {{name: sign_votes, accum_threshold: 2, e_accum_threshold: 4}}
  float: adamw
phases: [{{name: standard, steps: 8, batch_size: 2, block_size: 8, lr: 0.01}}]
"""


@pytest.fixture
def tiny(tmp_path: Path) -> Callable[..., RunConfig]:
    """Return a function that loads a tiny config with overrides."""
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be, that is the question; " * 20)
    file = tmp_path / "tiny.yaml"
    file.write_text(TINY.format(text=text))
    return lambda *overrides: load_config(file, overrides).config


FILES = ("test_sums", "test_schedule", "test_saving")


def on_all(world: World, folder: str) -> dict[str, Any]:
    results = {}
    for name in FILES:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        results[name] = module.on_rank(world, Path(folder) / name)
    return results


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    """Run ``on_rank(world, folder)`` of each file on two ranks.

    Returns:
        What it returned, by rank and file; and a folder that has one for each file.
    """
    folder = tmp_path_factory.mktemp("ranks")
    for name in FILES:
        (folder / name).mkdir()
    return on_ranks(2, on_all, str(folder)), folder
