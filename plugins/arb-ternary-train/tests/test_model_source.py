"""Models that are no runs are opened by the readers that plugins register."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from arb_ternary.errors import DataError, EnvironmentProblem, UsageProblem
from arb_ternary.plugins.manager import manager
from arb_ternary_train.cli.generate import generator_for
from arb_ternary_train.model_source import ModelSource, find_run, open_model, read_source
from arb_ternary_train.model_state import run_of


class Scale(nn.Linear):
    """A model of one weight."""

    def __init__(self) -> None:
        super().__init__(1, 1)


def read_scale(source: str) -> ModelSource:
    """Read files that end in ``.scale``."""
    if not source.endswith(".scale"):
        raise DataError(f"{source}: is no scale")
    return ModelSource(
        shown=source, model={"name": "scale"}, vocabulary_size=1, attachments={}, build=Scale
    )


def read_nothing(source: str) -> ModelSource:
    """Read no file."""
    raise DataError(f"{source}: cannot be read")


@pytest.fixture
def readers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the registered readers: none to begin with."""
    targets: list[str] = []

    def results(hook: str) -> list[tuple[None, str]]:
        assert hook == "arb_register_model_readers"
        return [(None, target) for target in targets]

    monkeypatch.setattr(manager().registry, "results", results)
    return targets


def test_without_a_reader_the_error_says_what_is_missing(
    readers: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.scale").touch()
    monkeypatch.setattr("arb_ternary.plugins.registry.announced", lambda: {"command.import": "far"})
    with pytest.raises(EnvironmentProblem, match=r"a\.scale: is not a run, and nothing") as problem:
        read_source(tmp_path / "a.scale")
    assert "command 'import' is not installed" in problem.value.what
    assert problem.value.hint == "pip install far"


def test_the_first_reader_that_can_opens_the_model(readers: list[str], tmp_path: Path) -> None:
    readers += [f"{__name__}:read_nothing", f"{__name__}:read_scale"]
    for name in ("a.scale", "b.txt"):
        (tmp_path / name).touch()
    opened = open_model(tmp_path / "a.scale", backend="torch")
    assert isinstance(opened.module, Scale)
    assert not opened.module.training
    assert (opened.run, opened.device, opened.backend) == (None, torch.device("cpu"), "torch")
    assert open_model("far://a.scale").source.shown == "far://a.scale"
    with pytest.raises(DataError, match=r"b\.txt: cannot be read"):
        open_model(tmp_path / "b.txt")


def test_a_run_is_found_by_itself_and_by_its_checkpoints_only(tiny: Any) -> None:
    run, _ = tiny.run("run")
    checkpoint = run.checkpoints / "step-00000006"
    other = run.path / "exports" / "model.scale"
    other.parent.mkdir()
    other.touch()
    moved = tiny.folder / "moved"
    moved.mkdir()
    (moved / "manifest.json").touch()
    assert find_run(run.path) == run
    assert find_run(checkpoint) is not None
    assert run_of(run.checkpoints / "step-00000001") is not None  # It has been deleted.
    assert find_run(other) is None
    with pytest.raises(UsageProblem, match=r"it has no run\.json"):
        find_run(moved)
    with pytest.raises(UsageProblem, match="there is no such file or folder") as unknown:
        find_run(tiny.folder / "rnu")
    assert "did you mean" in unknown.value.hint


def test_an_open_run_is_the_run(tiny: Any) -> None:
    run, _ = tiny.run("run")
    opened = open_model(str(run.path))
    assert opened.run is not None
    assert opened.source.model["name"] == opened.run.config.model.name
    assert opened.source.attachments == run.attachments()


def test_generators_that_name_a_component_suit_runs_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def generator(name: str, **named: tuple[str, ...]) -> SimpleNamespace:
        spec = {"models": (), "masking": (), "data": (), **named}
        return SimpleNamespace(name=name, spec=SimpleNamespace(**spec))

    known = [generator("any"), generator("one", data=("d",)), generator("two", models=("m",))]
    monkeypatch.setattr(manager().registry, "all", lambda kind: known)
    assert generator_for(None).name == "any"
    del known[0]
    with pytest.raises(UsageProblem, match="draws from a model that is no run"):
        generator_for(None)
