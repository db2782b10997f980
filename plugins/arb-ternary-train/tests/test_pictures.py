"""Pictures with one class each, from a plugin that knows nothing of text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from arb_ternary.plugins.manager import manager, reset_manager
from arb_ternary_train.restore import load_run, measure

PLUGIN = '''
import numpy as np
import torch
from torch import nn

from arb_ternary import TernaryLinear, hookimpl
from arb_ternary.protocols.data import Batch, MaskedBatch
from arb_ternary.specs import DataSpec, MaskingSpec, ModelSpec

ARB_API_VERSION = (1, 0)


class Loader:
    continues = False

    def __init__(self, source, request):
        self.source, self.request, self.cursor = source, request, 0

    def __next__(self):
        generator = np.random.default_rng([self.request.seed % 2**32, self.cursor])
        self.cursor += 1
        return self.source.batch(generator.integers(0, 64, self.request.batch_size))

    def state_dict(self):
        return {"cursor": self.cursor}

    def load_state_dict(self, state):
        self.cursor = state["cursor"]

    def close(self):
        pass


class Pictures:
    """Noise of 3 x 4 x 4; the channel of the class is brighter."""

    name = "pictures"
    vocabulary_size = 3

    def batch(self, ids):
        bright = np.eye(3)[:, :, None, None] / 4
        noise = [np.random.default_rng(int(i)).normal(bright[i % 3], 0.1, (3, 4, 4)) for i in ids]
        pictures = torch.from_numpy(np.stack(noise)).float()
        ids = torch.from_numpy(np.asarray(ids))
        return Batch(pictures, ids, {"classes": ids % 3})

    def fingerprint(self):
        return "pictures"

    def batches(self, request):
        return Loader(self, request)

    def samples_per_epoch(self, block_size):
        return 64

    def held_out(self, batch_size, block_size, limit):
        ids = np.arange(100, 130)
        last = len(ids) if limit is None else min(len(ids), limit * batch_size)
        return (self.batch(ids[start : start + batch_size]) for start in range(0, last, batch_size))


class Classes:
    def apply(self, batch, generator, context):
        classes = batch.extras["classes"]
        return MaskedBatch(batch.data, classes, torch.ones_like(classes, dtype=torch.bool))


class Flat(nn.Module):
    def __init__(self, vocabulary_size):
        super().__init__()
        self.head = TernaryLinear(48, vocabulary_size, group_size="row")

    def forward(self, pictures):
        return self.head(pictures.flatten(1))


@hookimpl
def arb_register_datasets():
    return [DataSpec(name="pictures", target="pictures:build_data")]


@hookimpl
def arb_register_masking():
    return [MaskingSpec(name="classes", target="pictures:build_masking")]


@hookimpl
def arb_register_models():
    return [ModelSpec(name="flat", target="pictures:build_model")]


def build_data(config):
    return Pictures()


def build_masking(config):
    return Classes()


def build_model(config, vocabulary_size):
    return Flat(vocabulary_size)
'''

PARTS = (
    "data={name: pictures}",
    "model={name: flat}",
    "masking={name: classes}",
    "optimizer={name: sign_votes, accum_threshold: 2}",
    "phases.0.lr=null",
    "phases.0.batch_size=8",
    "phases.0.steps=60",
)


@pytest.fixture(autouse=True)
def plugin(tmp_path: Path) -> Iterator[None]:
    """Load the plugin from a file."""
    file = tmp_path / "pictures.py"
    file.write_text(PLUGIN)
    reset_manager()
    manager().load_file(file)
    yield
    reset_manager()


def test_pictures_are_learned_resumed_and_evaluated(tiny: Any, files_in: Any) -> None:
    run, report = tiny.run("run", *PARTS)
    assert report.tokens == 60 * 8
    assert report.validation_loss < 0.9, "three classes alike would have ln 3 = 1.0986"
    assert report.baselines == {}
    assert json.loads(run.result_file.read_text())["baselines"] == []
    assert run.attachments() == {}
    assert measure(load_run(run.path))[0].loss == report.validation_loss
    (run.checkpoints / "step-00000060" / "model.safetensors").write_bytes(b"")
    before = files_in(run.path, ["metrics.jsonl"])
    tiny.run("run", *PARTS, resume="auto")
    assert files_in(run.path, ["metrics.jsonl"]) == before
