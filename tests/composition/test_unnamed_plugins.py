"""A plugin that no config names changes no byte of a run."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from arb_ternary.backends.select import reset_backends
from arb_ternary.plugins.manager import manager, reset_manager
from arb_ternary_testing.fakes import install_fake_plugin
from arb_ternary_train.loading import load_config
from arb_ternary_train.progress import Silent
from arb_ternary_train.runner import RunRequest, train

CONFIG = """
name: plain
data: {{name: text, path: {text}}}
model: {{name: decoder, width: 16, layers: 1, heads: 2, max_length: 8, group_size: 32}}
optimizer: {{name: sign_votes, accum_threshold: 2}}
checkpoint: {{every: 2, keep: 5}}
phases: [{{name: standard, steps: 4, batch_size: 2, block_size: 8, eval_every: 2, eval_batches: 1}}]
"""

#: One component of every kind; building any of them raises an error.
PLUGIN = """
from arb_ternary import hookimpl
from arb_ternary.specs import (
    BackendSpec, CommandSpec, DataSpec, MaskingSpec, ModelSpec, OptimizerSpec, PhaseSpec,
)
from arb_ternary.specs import CheckSpec, ExporterSpec, ImporterSpec, TrackerSpec

ARB_API_VERSION = (1, 0)
TARGET = "arb_ternary_bystander.parts:explode"

@hookimpl
def arb_register_backends():
    return [BackendSpec(name="bystander", target=TARGET, probe="arb_ternary_bystander.parts:probe")]

@hookimpl
def arb_register_optimizers():
    return [OptimizerSpec(name="bystander", target=TARGET, accepts={"ternary", "float"})]

@hookimpl
def arb_register_masking():
    return [MaskingSpec(name="bystander", target=TARGET)]

@hookimpl
def arb_register_phases():
    return [PhaseSpec(name="bystander", target=TARGET)]

@hookimpl
def arb_register_models():
    return [ModelSpec(name="bystander", target=TARGET)]

@hookimpl
def arb_register_datasets():
    return [DataSpec(name="bystander", target=TARGET)]

@hookimpl
def arb_register_trackers():
    return [TrackerSpec(name="bystander", target=TARGET)]

@hookimpl
def arb_register_exporters():
    return [ExporterSpec(name="bystander", target=TARGET)]

@hookimpl
def arb_register_importers():
    return [ImporterSpec(name="bystander", target=TARGET)]

@hookimpl
def arb_register_commands():
    return [CommandSpec(name="bystander", target=TARGET)]

@hookimpl
def arb_register_checks():
    return [CheckSpec(name="bystander", target=TARGET)]
"""

PARTS = """
from arb_ternary.backends.protocol import ProbeResult

def explode(*arguments):
    raise AssertionError("the bystander was built")

def probe(device):
    return ProbeResult(False, "it only looks on")
"""

#: Only these files depend on the clock.
CLOCK = {"logs/train.log", "result.json", ".lock"}


def run(folder: Path, name: str) -> dict[str, bytes]:
    train(
        load_config(folder / "plain.yaml").config,
        RunRequest(directory=folder / name, reporter=Silent),
    )
    found = {
        str(path.relative_to(folder / name)): path
        for path in sorted((folder / name).rglob("*"))
        if path.is_file()
    }
    return {path: found[path].read_bytes() for path in found if path not in CLOCK}


@pytest.fixture
def _fresh() -> Iterator[None]:
    reset_manager()
    reset_backends()
    yield
    reset_manager()
    reset_backends()
    for module in [name for name in sys.modules if name.startswith("arb_ternary_bystander")]:
        del sys.modules[module]


@pytest.mark.usefixtures("_fresh")
def test_unnamed_plugin_changes_no_byte_of_a_run(
    tmp_path: Path,
) -> None:
    generator = random.Random(0)
    (tmp_path / "text.txt").write_text(
        " ".join(generator.choice(["to", "be", "or", "not"]) for _ in range(600))
    )
    (tmp_path / "plain.yaml").write_text(CONFIG.format(text=tmp_path / "text.txt"))
    without = run(tmp_path, "without")
    files = {"arb_ternary_bystander/plugin.py": PLUGIN, "arb_ternary_bystander/parts.py": PARTS}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(
            install_fake_plugin(tmp_path / "site", "arb-ternary-bystander", files)
        )
        reset_manager()
        reset_backends()
        record = next(record for record in manager().records if record.name == "bystander")
        assert record.loaded
        assert len(record.components) == 11
        assert run(tmp_path, "with") == without
    assert {
        "metrics.jsonl",
        "config.yaml",
        "run.json",
        "checkpoints/step-00000004/model.safetensors",
    } <= set(without)
