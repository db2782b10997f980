"""Tiny runs: a decoder of a few thousand weights on a few kilobytes of text."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import frozen

from arb_ternary.plugins.manager import manager, reset_manager
from arb_ternary_orchestrator.report import read_decisions
from arb_ternary_train.checkpoint import Checkpoint, CheckpointStore, read_checkpoint
from arb_ternary_train.checkpoint_format import encode_state
from arb_ternary_train.config import RunConfig
from arb_ternary_train.directory import RunDirectory
from arb_ternary_train.loading import load_config
from arb_ternary_train.metrics import read_metrics
from arb_ternary_train.progress import Silent
from arb_ternary_train.runner import RunRequest, train

CONFIG = """
name: tiny
seed: 3
data: {{name: text, path: {text}, tokenizer: characters}}
model:
  {{name: decoder, width: 16, layers: 1, heads: 2, max_length: 16, group_size: 32,
      float_parts: [norms, embedding]}}
optimizer: {{name: split, ternary: {{name: scaled_votes}}, float: adamw}}
checkpoint: {{every: 1000, keep: 9}}
trackers: []
phases:
  - {{name: standard, steps: 24, batch_size: 2, block_size: 8, lr: 0.01, lr_schedule: constant,
      eval_every: 0}}
"""

#: A third-party plugin with strategies that lose every comparison with the configured one.
HARMFUL = """
from arb_ternary import hookimpl
from arb_ternary_orchestrator.specs import StrategySpec
from arb_ternary_orchestrator.strategies import Strategy, chosen, with_options

ARB_API_VERSION = (1, 0)

@hookimpl
def arb_register_strategies():
    names = ("wild", "wilder", "crawl", "broken")
    return [StrategySpec(name=name, target=f"harmful:{name}", summary="harms") for name in names]

def another_rule(leaf):
    return chosen("lion")

def narrow_band(leaf):
    return with_options(leaf, band=1)

def votes_for_floats(leaf):
    return chosen("sign_votes")

broken = Strategy(name="broken", summary="cannot be", float_leaf=votes_for_floats)
wild = Strategy(name="wild", summary="harms", float_rate=300.0, ternary_rate=30.0)
wilder = Strategy(
    name="wilder", summary="harms", float_rate=3000.0, ternary_rate=60.0, grad_clip=0.1,
    float_leaf=another_rule, ternary_leaf=narrow_band,
)

def crawl():
    return Strategy(
        name="crawl", summary="learns next to nothing", float_rate=1e-6, ternary_rate=1e-6,
        float_leaf=another_rule, ternary_leaf=narrow_band,
    )
"""


@frozen
class Finished:
    """The results of a run."""

    directory: RunDirectory

    @property
    def last(self) -> Checkpoint:
        return read_checkpoint(CheckpointStore(self.directory.checkpoints).latest())

    @property
    def trained(self) -> dict[str, Any]:
        """Every bit that training has left: weights, exponents, votes, optimizer, generators,
        counters and cursor.
        """
        last = self.last
        loop = {key: value for key, value in last.state["phase"]["loop"].items() if key != "policy"}
        tree, tensors = encode_state(
            {"model": dict(last.model), "loop": loop, "rng": last.state["rng"]}
        )
        return {
            "tree": tree,
            "tensors": tensors,
            "step": last.state["step"],
            "tokens": last.state["tokens"],
        }

    @property
    def policy(self) -> Mapping[str, Any]:
        state: Mapping[str, Any] = self.last.state["phase"]["loop"]["policy"]
        return state

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return read_metrics(self.directory.metrics_file)

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The metrics without the decisions."""
        return [record for record in self.metrics if record["event"] != "decision"]

    @property
    def decisions(self) -> list[dict[str, Any]]:
        """The decisions without the value that depends on the clock."""
        found = read_decisions(self.directory.path)
        assert all(record.pop("seconds") >= 0 for record in found)
        return found


@frozen
class Tiny:
    """Writes the tiny config and runs it.

    Attributes:
        floats: overrides that make all of the model float: it trains in half the time.
    """

    folder: Path
    floats: tuple[str, str] = (
        "model={name: decoder, width: 16, layers: 1, heads: 2, max_length: 16,"
        " float_parts: [embedding, head, norms, linears]}",
        "optimizer=adamw",
    )

    @property
    def file(self) -> Path:
        return self.folder / "tiny.yaml"

    def config(self, *overrides: str) -> RunConfig:
        return load_config(self.file, overrides).config

    def run(
        self, name: str, *overrides: str, policy: Mapping[str, Any] | None = None, **request: Any
    ) -> Finished:
        """Run it, with an orchestrator that has the options ``policy``, or without one."""
        directory = RunDirectory(self.folder / name)
        options = {"directory": directory.path, "reporter": Silent, **request}
        if policy is not None:
            overrides = (
                *overrides,
                f"phases.0.policy={json.dumps({'name': 'orchestrator', **policy})}",
            )
        train(self.config(*overrides), RunRequest(**options))
        return Finished(directory)


@pytest.fixture
def tiny(tmp_path: Path) -> Tiny:
    generator = random.Random(0)
    words = ["to", "be", "or", "not", "that", "is", "the", "question"]
    text = tmp_path / "text.txt"
    text.write_text(" ".join(generator.choice(words) for _ in range(900)))
    made = Tiny(tmp_path)
    made.file.write_text(CONFIG.format(text=text))
    return made


@pytest.fixture
def harmful(tmp_path: Path) -> Iterator[None]:
    """Loads the strategies of :data:`HARMFUL`."""
    file = tmp_path / "harmful.py"
    file.write_text(HARMFUL)
    reset_manager()
    manager().load_file(file)
    yield
    reset_manager()


@pytest.fixture
def equal() -> Callable[[Any, Any], None]:
    """Asserts that two trees are the same, tensors bit for bit."""

    def compare(one: Any, other: Any, path: str = "") -> None:
        if isinstance(one, torch.Tensor):
            assert (one.dtype, one.shape) == (other.dtype, other.shape), path
            assert one.numpy().tobytes() == other.numpy().tobytes(), path
        elif isinstance(one, Mapping):
            assert one.keys() == other.keys(), path
            for key, value in one.items():
                compare(value, other[key], f"{path}/{key}")
        elif isinstance(one, list | tuple):
            assert len(one) == len(other), path
            for index, value in enumerate(one):
                compare(value, other[index], f"{path}/{index}")
        else:
            assert repr(one) == repr(other), path

    return compare
