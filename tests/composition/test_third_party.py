"""A third-party plugin for interface 1.0 loads, trains and resumes, through every hook of 1.0."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from arb_ternary import hookspecs
from arb_ternary.backends.select import reset_backends
from arb_ternary.cli.main import arb
from arb_ternary.plugins.hooks import specified_in
from arb_ternary.plugins.manager import manager, reset_manager
from arb_ternary_interchange.importing import find_source, import_model
from arb_ternary_interchange.inspection import inspect_path
from arb_ternary_train.loading import load_config
from arb_ternary_train.progress import Silent
from arb_ternary_train.restore import load_run
from arb_ternary_train.runner import RunRequest, train

# The fixture imports from the modules of the first version of interface 1.0.
pytestmark = [
    pytest.mark.filterwarnings("ignore:arb_ternary_train.specs.:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:arb_ternary_train.config_file.:DeprecationWarning"),
]

FIXTURE = Path(__file__).parents[1] / "fixtures" / "third_party"

CONFIG = """
name: heron
data: heron
model: {name: heron, width: 20}
masking: heron
optimizer: {name: heron.patient, threshold: 1}
checkpoint: {every: 1, keep: 9}
trackers: [heron]
checks: [heron]
phases:
  - {name: standard, steps: 3, batch_size: 2, block_size: 8, eval_every: 2, eval_batches: 1,
      policy: heron}
  - {name: heron, naps: 2}
"""


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(FIXTURE))
    reset_manager()
    reset_backends()
    yield
    monkeypatch.undo()
    reset_manager()
    reset_backends()
    for module in [name for name in sys.modules if name.startswith("arb_ternary_heron")]:
        del sys.modules[module]


def test_loads_with_one_component_of_every_kind() -> None:
    record = next(record for record in manager().records if record.name == "heron")
    assert record.loaded, record.reason
    kinds = [found.kind for found in record.components]
    assert sorted(kinds) == sorted(manager().registry.kinds)
    assert "arb_register_documents" in record.results


def test_it_implements_every_hook_of_interface_1_0() -> None:
    source = "".join(path.read_text() for path in (FIXTURE / "arb_ternary_heron").glob("*.py"))
    missing = [name for name in specified_in(hookspecs) if f"def {name}(" not in source]
    assert missing == ["arb_register_hooks"]  # Added later.


def test_its_own_kind_of_config_file_is_started_and_checked(tmp_path: Path) -> None:
    path = tmp_path / "model.yaml"
    for arguments in (
        ["new", str(path), "--template", "heron"],
        ["validate", str(path), "--document", "heron"],
    ):
        done = CliRunner().invoke(arb, ["config", *arguments])
        assert done.exit_code == 0, done.output
    assert "width: 24" in path.read_text()


def test_trains_in_its_own_layout_and_resumes_bitwise(
    tmp_path: Path,
) -> None:
    path = tmp_path / "heron.yaml"
    path.write_text(CONFIG)
    config = load_config(path).config
    report = train(config, RunRequest(directory=tmp_path / "run", reporter=Silent))
    events = sys.modules["arb_ternary_heron.parts"].EVENTS
    assert [event for event in events if not event.startswith("step_end")] == [
        "run_start",
        "phase_start standard",
        "eval_end 2",
        "phase_end standard",
        "phase_start heron",
        "phase_end heron",
        "eval_end 3",
        "run_end finished",
    ]
    assert [event for event in events if event.startswith("step_end")] == [
        f"step_end {n} True" for n in (1, 2, 3)
    ]
    assert report.audit.pure
    assert report.checks[0][1].passed

    checkpoints = tmp_path / "run" / "checkpoints"
    ends = sorted(checkpoints.glob("step-*"))
    final = (ends[-1] / "model.safetensors").read_bytes()
    train(config, RunRequest(resume=str(ends[0]), reporter=Silent))
    assert any(event.startswith("checkpoint_load") for event in events)
    drawn = CliRunner().invoke(arb, ["generate", str(tmp_path / "run")])
    assert drawn.output == f"from {tmp_path / 'run'}\n"
    assert (sorted(checkpoints.glob("step-*"))[-1] / "model.safetensors").read_bytes() == final


def test_its_importer_makes_a_run(tmp_path: Path) -> None:
    source = tmp_path / "one.feather"
    source.write_text("1 0 -1 1 " * 4)
    imported = import_model(find_source(str(source)), tmp_path / "run")
    assert imported == ("every row is the same",)
    run = load_run(tmp_path / "run")
    assert bool((run.model.head.trits() == torch.tensor([1, 0, -1, 1] * 4)).all())
    assert inspect_path(str(source))["format"] == "feather"


EXACT_DECODER = """exact: true
model: {name: decoder, width: 20, layers: 2, heads: 2, max_length: 8, group_size: 32,
    learned_norms: true}
"""


@pytest.mark.parametrize(
    "model", ["model: {name: heron, width: 20}\n", EXACT_DECODER], ids=["float", "exact"]
)
def test_a_layout_of_its_own_gives_the_bytes_of_the_reference(model: str, tmp_path: Path) -> None:
    path = tmp_path / "heron.yaml"
    path.write_text(
        CONFIG.replace("trackers: [heron]", "trackers: []").replace(
            "model: {name: heron, width: 20}\n", model
        )
    )
    finals = []
    for backend in ("heron", "torch"):
        train(
            load_config(path).config,
            RunRequest(directory=tmp_path / backend, backend=backend, reporter=Silent),
        )
        checkpoint = sorted((tmp_path / backend / "checkpoints").glob("step-*"))[-1]
        finals.append((checkpoint / "model.safetensors").read_bytes())
    assert finals[0] == finals[1]


def test_its_command_runs() -> None:
    result = CliRunner().invoke(arb, ["heron"])
    assert result.output == "...\n"
