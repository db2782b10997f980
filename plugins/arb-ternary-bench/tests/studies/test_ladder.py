"""The ladder: its text, its grid, and the settings between two widths."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from arb_ternary.config.yaml_document import Document
from arb_ternary.plugins.manager import manager
from arb_ternary_bench.studies import ladder
from arb_ternary_bench.studies.ladder import (
    PIECE,
    PIECES,
    LadderOptions,
    Setting,
    config,
    divide_text,
    library_source,
    setting_at,
)
from arb_ternary_bench.study import Session
from arb_ternary_train.loading import structure_run

GRID = ladder.read_grid()
RESULTS = Path(__file__).parents[2] / "results"


def test_pieces_to_measure_on_are_in_no_other_part(tmp_path: Path) -> None:
    text = "".join(f"{number:06d}\n" for number in range(300_000))
    files = divide_text(text, tmp_path)
    train = files["train"].read_text()
    assert text.startswith(train)
    assert len(train) == len(text) * 8 // 10
    for name in ("choice", "validation"):
        pieces = files[name].read_text()
        assert len(pieces) == PIECES * PIECE
        assert pieces[: 100 * 7] in text[len(train) :]
        assert pieces[: 100 * 7] not in train


def test_the_source_is_the_single_files_of_the_library(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    contents = {"b.py": "second = 2", "a.py": "first = 1", "c.txt": "no", "inner/a.py": "no"}
    for name, content in contents.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    assert library_source(tmp_path) == "first = 1\nsecond = 2"
    assert len(library_source()) > 2_000_000


def test_rates_between_two_widths_are_powers_of_the_width() -> None:
    narrow = Setting(4e-3, 0.12, {"weight_decay": 0.1})
    wide = Setting(1e-3, 0.12)
    assert setting_at(96, narrow, wide) == narrow
    assert setting_at(640, narrow, wide) == wide
    between = setting_at(248, narrow, wide)  # the geometric mean of both widths, nearly
    assert between.floats == pytest.approx(2e-3, rel=0.01)
    assert between.votes == 0.12
    assert between.options == narrow.options
    assert setting_at(320, Setting(votes=0.1), Setting(votes=0.1)) == Setting(votes=0.1)


@pytest.mark.parametrize("way", GRID["ways"])
def test_every_way_gives_a_valid_config(way: str) -> None:
    entry = GRID["ways"][way]
    setting = Setting(**GRID["trials"][96][entry["settings"]][-1])
    plain = config(entry, 192, 1024, setting)
    data = {"name": "shakespeare"}
    document = Document({**plain, "seed": 0, "data": data}, way)
    options = structure_run(document, manager().registry).config.phases[0].options
    assert options.steps * options.batch_size == 1024 * 16


def test_the_study_tunes_chooses_and_trains(
    fake: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loss(plain: Any) -> float:
        optimizer = plain["optimizer"]
        return float(optimizer.get("float", optimizer)["lr"])

    fake.loss = staticmethod(loss)
    fake.step_tokens = None
    monkeypatch.setattr(ladder, "_with_rates", with_plain_rates)
    options = LadderOptions(only=("float32-96-0", "votes8-96-0"))
    result = ladder.run(options, Session(tmp_path))
    assert sorted(result["finals"]) == ["float32-96-0", "votes8-96-0"]
    final = result["finals"]["float32-96-0"]
    assert (final["floats"], final["loss"]) == (2e-3, 2e-3)
    assert final["gradient_bytes"] == 40
    assert result["settings"]["votes8"][0] == {"floats": 3e-3, "votes": 0.05, "options": {}}
    trials = sum(len(ways) for each in GRID["trials"].values() for ways in each.values())
    assert len(result["trials"]) == trials
    assert len(ladder.TABLE.rows(result)) == 2


def with_plain_rates(optimizer: Any, steps: int, setting: Setting) -> dict[str, Any]:
    """Set the rates without scaling them, so that the losses are known."""
    if optimizer["name"] == "split":
        rates = {"ternary": {"lr": setting.votes}, "float": {"lr": setting.floats}}
        return ladder.merged(optimizer, rates)
    return {**optimizer, "lr": setting.floats or setting.votes, **setting.options}


def test_the_committed_result_is_drawn(tmp_path: Path) -> None:
    result = json.loads((RESULTS / "ladder.json").read_text())
    ladder.STUDY.finish(result, tmp_path)
    assert (tmp_path / "ladder.png").read_bytes().startswith(b"\x89PNG")
    assert "| 1.1 M | votes8 |" in (tmp_path / "table.md").read_text()
