"""The study ``scale``: configs, the choice of a factor, the figure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from arb_ternary.config.yaml_document import Document
from arb_ternary.errors import ComponentError
from arb_ternary.plugins.manager import manager
from arb_ternary_bench.studies import scale
from arb_ternary_bench.studies.scale import ScaleOptions
from arb_ternary_bench.study import Session
from arb_ternary_train.loading import structure_run

OPTIONS = ScaleOptions(
    tokens=40_000, batches=2, packages=("click",), device="cpu", backend="torch", jobs=1
)


@pytest.mark.parametrize("way", scale.SETTINGS)
def test_every_way_gives_a_valid_config(way: str, tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("train", "choice", "validation")}
    planned = scale._Plans(OPTIONS, files).final(way, 0.5, 3)
    options = structure_run(Document(planned.config, way), manager().registry).config
    (phase,) = options.phases
    assert planned.tokens == phase.options.steps * phase.options.batch_size * 128 == 10 * 4096
    assert options.seed == 3


def test_the_best_factor_is_taken_for_every_seed(fake: Any, tmp_path: Path) -> None:
    def loss(plain: Any) -> float:
        optimizer = plain["optimizer"]
        return abs(float(optimizer.get("float", optimizer)["lr"]) - 0.7 * 0.00126 * 2.5)

    fake.loss = staticmethod(loss)
    fake.step_tokens = None
    options = evolve(OPTIONS, ways=("votes8",), seeds=(0, 1))
    result = scale.run(options, Session(tmp_path))
    assert len(result["trials"]) == 3
    assert {name: row["factor"] for name, row in result["finals"].items()} == {
        "votes8-640-0": 0.7,
        "votes8-640-1": 0.7,
    }
    assert len(scale.TABLE.rows(result)) == 2
    scale.draw(result, tmp_path / "scale.png")
    assert (tmp_path / "scale.png").stat().st_size > 1000


def test_unknown_ways_and_packages_are_named(tmp_path: Path) -> None:
    with pytest.raises(ComponentError, match="ways: sgd: choose from votes8, float32, qat"):
        scale.run(ScaleOptions(ways=("sgd",)), Session(tmp_path))
    with pytest.raises(ComponentError, match="packages: no_such_package is not installed here"):
        scale.run(ScaleOptions(packages=("no_such_package",)), Session(tmp_path))
