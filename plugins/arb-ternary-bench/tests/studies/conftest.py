"""Studies without training: runs whose loss is a formula of their settings."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
from attrs import define

from arb_ternary.config.yaml_document import read_yaml
from arb_ternary_bench import runs
from arb_ternary_bench.child import Ended
from arb_ternary_bench.quality.recipes import Recipe
from arb_ternary_bench.quality.trials import STEP_TOKENS
from arb_ternary_bench.studies import quality
from arb_ternary_bench.studies.quality import QualityOptions
from arb_ternary_bench.study import Session
from arb_ternary_testing.fakes import RUN_RECORD
from arb_ternary_train.directory import RunDirectory
from arb_ternary_train.metrics import to_line


def float_recipe(
    name: str = "one", rates: Sequence[float] = (1e-3, 2e-3, 3e-3, 4e-3), **changes: Any
) -> Recipe:
    """Make a recipe of AdamW on a float decoder, with rates as trials."""
    fields: dict[str, Any] = {
        "name": name,
        "overrides": {
            "model": {
                "float_parts": ["embedding", "head", "norms", "linears"],
                "activations": "float",
            },
            "optimizer": {"name": "adamw"},
        },
        "trials": {"optimizer.lr": list(rates)},
        "without": ("model.group_size", "model.scale_rule"),
    }
    return Recipe(**{**fields, **changes})


@pytest.fixture
def make_recipe() -> Callable[..., Recipe]:
    return float_recipe


@define(eq=False)
class FakeRun:
    """Stands for ``ChildRun``: its loss is ``loss(config)``, or an exit code that this raises."""

    directory: Path
    log: Path
    code: int

    #: Names of the runs that were started, in order; set by the fixture.
    started: ClassVar[list[str]]
    loss: ClassVar[Callable[[Mapping[str, Any]], float]]
    #: Tokens per step that it reports; None counts those of the config.
    step_tokens: ClassVar[int | None] = STEP_TOKENS

    @classmethod
    def start(
        cls, config: Path, directory: Path, *, resume: bool, threads: int, detached: bool
    ) -> FakeRun:
        assert resume
        assert detached
        values = read_yaml(config.read_text(), config.name).data
        cls.started.append(directory.name)
        log = directory.with_name(f"{directory.name}.log")
        try:
            loss = cls.loss(values)
        except SystemExit as error:
            log.write_text("error: it did not work\n")
            return cls(directory, log, int(error.code or 0))
        run = RunDirectory(directory)
        if not run.exists():
            run.create("", RUN_RECORD, {})
        (run.checkpoints / "step-1").mkdir(exist_ok=True)
        (phase,) = values["phases"]
        tokens = phase["steps"] * (cls.step_tokens or phase["batch_size"] * phase["block_size"])
        events = [
            {"event": "train", "step": 1, "tokens": STEP_TOKENS},
            {"event": "validation", "step": 1, "loss": loss + 1},
            {"event": "train", "step": phase["steps"], "tokens": tokens},
            {"event": "validation", "step": phase["steps"], "loss": loss},
        ]
        run.metrics_file.write_bytes(b"".join(map(to_line, events)))
        audit = {"parameters": 10, "float_parameters": 10, "ternary_weights": 0}
        linears = {"weights": 5, "state_bytes": 60, "gradient_bytes": 20}
        report = {
            "tokens": tokens,
            "validation_loss": loss,
            "unigram_entropy": 3.0,
            "bigram_entropy": 2.0,
            "tokens_per_second": 1000.0,
            "audit": {**audit, "state_bytes": 120, "state_bits_per_parameter": 96.0},
            "linears": {**linears, "state_bits_per_weight": 96.0},
        }
        run.result_file.write_text(json.dumps(report))
        return cls(directory, log, 0)

    def poll(self) -> Ended:
        return Ended(self.code, 2**20)

    def report(self) -> dict[str, Any]:
        report: dict[str, Any] = json.loads((self.directory / "result.json").read_text())
        return report

    def log_tail(self, lines: int = 12) -> str:
        return "\n".join(self.log.read_text().splitlines()[-lines:])


def rate_and_seed(config: Mapping[str, Any]) -> float:
    return float(config["optimizer"]["lr"] + config["seed"] / 100)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeRun]:
    """Replaces runs; the loss is the learning rate plus a hundredth of the seed."""
    monkeypatch.setattr(runs, "ChildRun", FakeRun)
    monkeypatch.setattr(FakeRun, "started", [], raising=False)
    monkeypatch.setattr(FakeRun, "loss", staticmethod(rate_and_seed), raising=False)
    monkeypatch.setattr(FakeRun, "step_tokens", STEP_TOKENS)
    return FakeRun


@pytest.fixture
def run_quality(
    fake: type[FakeRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., dict[str, Any]]:
    """Runs the study with recipes and changed options; what it says goes to ``said``."""

    def run(*recipes: Recipe, said: list[str] | None = None, **changes: Any) -> dict[str, Any]:
        known = {recipe.name: recipe for recipe in recipes or (float_recipe(),)}
        monkeypatch.setattr(quality, "load_recipes", lambda further: known)
        options: dict[str, Any] = {
            "size": "tiny",
            "seeds": 2,
            "tokens": 8 * STEP_TOKENS,
            "tuning_tokens": 4 * STEP_TOKENS,
        }
        say = (lambda line: None) if said is None else said.append
        session = Session(tmp_path / "study", say)
        return quality.run(QualityOptions(**{**options, **changes}), session)

    return run
