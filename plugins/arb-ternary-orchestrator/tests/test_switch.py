"""``arb orchestrator switch``: the request that it leaves, and its errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from arb_ternary.cli.main import main
from arb_ternary.config.fields import to_plain
from arb_ternary.config.yaml_document import dump_yaml
from arb_ternary_orchestrator.control import CONTROL_FILE
from arb_ternary_testing.fakes import RUN_RECORD
from arb_ternary_train.directory import RunDirectory
from arb_ternary_train.loading import load_config

CONFIG = """
name: tiny
data: {name: text, path: text.txt}
model: {name: decoder, width: 16, layers: 1, heads: 2, max_length: 8, group_size: 32,
    float_parts: [norms]}
optimizer: {name: split, ternary: {name: scaled_votes}, float: {name: adamw}}
phases:
- name: standard
  steps: 2000
  batch_size: 2
  block_size: 8
  POLICY
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question. " * 40)
    return made("policy: {name: orchestrator}")


def made(policy: str, name: str = "demo") -> Path:
    Path("config.yaml").write_text(CONFIG.replace("POLICY", policy))
    directory = RunDirectory(Path(name))
    directory.create(dump_yaml(to_plain(load_config("config.yaml").config)), RUN_RECORD, {})
    return directory.path


def switch(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, str]:
    code = main(["orchestrator", "switch", *map(str, arguments)])
    shown = capsys.readouterr()
    return code, shown.out + shown.err


def test_switch_leaves_a_request(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, output = switch(capsys, run, "sgd_escape")
    assert code == 0, output
    assert "demo: asked for the strategy sgd_escape" in output
    assert "between two steps" in output
    assert "--resume" in output
    first = json.loads((run / CONTROL_FILE).read_text())
    assert first["name"] == "sgd_escape"
    code, output = switch(capsys, run, "spike_resistant")
    assert "It replaces an earlier request, for sgd_escape, that was not taken yet." in output
    second = json.loads((run / CONTROL_FILE).read_text())
    assert second["name"] == "spike_resistant"
    assert second["id"] != first["id"]
    assert [path.name for path in run.iterdir() if "control" in path.name] == [CONTROL_FILE]


def test_unknown_strategy_suggests_the_nearest(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, output = switch(capsys, run, "sgd_escap")
    assert code == 2
    assert "no strategy is called 'sgd_escap'" in output
    assert "did you mean 'sgd_escape'?" in output
    assert "conservative_adamw" in output
    assert not (run / CONTROL_FILE).exists()


def test_strategy_outside_the_list_is_an_error(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = made("policy: {name: orchestrator, strategies: [aggressive_votes]}", "few")
    code, output = switch(capsys, few, "conservative_votes")
    assert code == 2
    assert "does not choose among strategies of the name 'conservative_votes'" in output
    assert "its strategies: aggressive_votes, configured, spike_resistant" in output
    for name in ("aggressive_votes", "configured", "spike_resistant"):
        assert switch(capsys, few, name)[0] == 0


def test_ended_run_and_plain_run_are_errors(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = made("lr: 0.01", "plain")
    code, output = switch(capsys, plain, "sgd_escape")
    assert code == 2
    assert "this run has no orchestrator" in output
    (run / "result.json").write_text("{}")
    code, output = switch(capsys, run, "sgd_escape")
    assert code == 2
    assert "the run has ended" in output
    assert "arb orchestrator explain demo" in output
    assert not (run / CONTROL_FILE).exists()


def test_missing_run_suggests_the_nearest(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, output = switch(capsys, "dem", "sgd_escape")
    assert code == 2
    assert "did you mean demo?" in output


def test_invalid_request_is_replaced(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / CONTROL_FILE).write_text("{")
    assert switch(capsys, run, "sgd_escape")[0] == 0
    assert json.loads((run / CONTROL_FILE).read_text())["name"] == "sgd_escape"
