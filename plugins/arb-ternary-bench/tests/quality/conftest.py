"""Studies without training: runs whose loss is a formula of their settings, and recipes that a test
registers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
from attrs import define, evolve

from arb_ternary import hookimpl
from arb_ternary.config.yaml_document import read_yaml
from arb_ternary.plugins.manager import manager, reset_manager
from arb_ternary_bench.child import Ended
from arb_ternary_bench.quality import pool
from arb_ternary_bench.quality import study as study_module
from arb_ternary_bench.quality.protocol import Recipe
from arb_ternary_bench.quality.sizes import SIZES, STEP_TOKENS
from arb_ternary_bench.quality.study import QualityStudy
from arb_ternary_bench.specs import RecipeSpec
from arb_ternary_train.directory import RunDirectory
from arb_ternary_train.metrics import to_line


@pytest.fixture
def float_recipe() -> Callable[..., Recipe]:
    """Makes a recipe of AdamW on a float decoder, with rates as trials and options of the phase."""
    return _float_recipe


def _float_recipe(rates: Sequence[float] = (1e-3, 2e-3, 3e-3, 4e-3), **phase: Any) -> Recipe:
    return Recipe(
        overrides={
            "model": {
                "float_parts": ["embedding", "head", "norms", "linears"],
                "activations": "float",
            },
            "optimizer": {"name": "adamw"},
            "phase": phase,
        },
        trials=[{"optimizer": {"lr": rate}} for rate in rates],
        without=("model.group_size", "model.scale_rule"),
    )


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Registers recipes by name."""
    module = ModuleType("recipes_of_a_test")
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def register(**factories: Callable[[int], Any]) -> None:
        vars(module).update(factories)
        specs = [
            RecipeSpec(name=name, target=f"{module.__name__}:{name}", summary=name)
            for name in factories
        ]

        class Provides:
            @hookimpl
            def arb_register_recipes(self) -> list[RecipeSpec]:
                return specs

        manager().register(Provides(), "-".join(factories))

    reset_manager()
    yield register
    reset_manager()


@define(eq=False)
class FakeRun:
    """Stands for ``ChildRun``: its loss is ``loss(config)``, an exit code for an exception of that
    value.
    """

    directory: Path
    log: Path
    code: int

    #: Names of the runs that were started, in order; set by the fixture.
    started: ClassVar[list[str]]
    loss: ClassVar[Callable[[Mapping[str, Any]], float]]

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
            run.create("", {"backend": {"name": "torch"}, "versions": {}}, {})
        (run.checkpoints / "step-1").mkdir(exist_ok=True)
        (phase,) = values["phases"]
        events = [
            {"event": "train", "step": 1, "tokens": STEP_TOKENS},
            {"event": "validation", "step": 1, "loss": loss + 1},
            {"event": "train", "step": phase["steps"], "tokens": phase["steps"] * STEP_TOKENS},
            {"event": "validation", "step": phase["steps"], "loss": loss},
        ]
        run.metrics_file.write_bytes(b"".join(map(to_line, events)))
        report = {
            "tokens": phase["steps"] * STEP_TOKENS,
            "validation_loss": loss,
            "unigram_entropy": 3.0,
            "bigram_entropy": 2.0,
            "tokens_per_second": 1000.0,
            "audit": {
                "parameters": 10,
                "float_parameters": 10,
                "ternary_weights": 0,
                "state_bytes": 120,
                "state_bits_per_parameter": 96.0,
            },
            "linears": {
                "weights": 5,
                "state_bytes": 60,
                "gradient_bytes": 20,
                "state_bits_per_weight": 96.0,
            },
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


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeRun]:
    """Runs become :class:`FakeRun`, whose loss is the learning rate plus a hundredth of the seed;
    figures are blank.
    """
    monkeypatch.setattr(pool, "ChildRun", FakeRun)
    for draw in ("draw_losses", "draw_frontier"):
        monkeypatch.setattr(study_module, draw, lambda result, path: path.touch())
    monkeypatch.setattr(FakeRun, "started", [], raising=False)
    monkeypatch.setattr(FakeRun, "loss", staticmethod(rate_and_seed), raising=False)
    return FakeRun


def rate_and_seed(config: Mapping[str, Any]) -> float:
    return float(config["optimizer"]["lr"] + config["seed"] / 100)


@pytest.fixture
def study(tmp_path: Path) -> Callable[..., QualityStudy]:
    """A study of the recipe ``one``, in a folder of the test, with changes."""
    base = QualityStudy(
        folder=tmp_path / "study",
        rules=("one",),
        size=SIZES["tiny"],
        seeds=2,
        tokens=8 * STEP_TOKENS,
        tuning_tokens=4 * STEP_TOKENS,
    )
    return lambda **changes: evolve(base, **changes)
