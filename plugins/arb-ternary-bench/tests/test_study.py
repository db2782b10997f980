"""The runner of studies: names, options, and results of before."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from arb_ternary.errors import ConfigError, UsageProblem
from arb_ternary_bench.study import Study, find_study, main, study_names

EXAMPLE = Path(__file__).parents[3] / "docs" / "examples" / "network-7b.yaml"


@pytest.mark.parametrize("name", study_names())
def test_every_study_is_found_and_has_a_table(name: str) -> None:
    study = find_study(name)
    assert isinstance(study, Study)
    assert study.table.titles


def test_an_unknown_study_is_answered_with_the_nearest() -> None:
    with pytest.raises(UsageProblem, match="no study is called 'qualty'") as caught:
        find_study("qualty")
    assert "did you mean 'quality'?" in caught.value.hint


def test_an_unknown_option_is_an_error_with_its_place() -> None:
    done = CliRunner().invoke(main, ["quality", "-o", "sizes=small"])
    assert isinstance(done.exception, ConfigError)
    assert "did you mean 'size'" in str(done.exception)


def test_an_earlier_result_is_shown_without_measuring(tmp_path: Path) -> None:
    first = tmp_path / "first"
    done = CliRunner().invoke(main, ["network", str(EXAMPLE), "--out", str(first)])
    assert done.exit_code == 0, done.output
    again = tmp_path / "again"
    earlier = str(first / "result.json")
    shown = CliRunner().invoke(main, ["network", "--from", earlier, "--out", str(again)])
    assert shown.stdout == done.stdout
    assert (again / "table.md").read_text() == (first / "table.md").read_text()
    assert json.loads((again / "result.json").read_text())["study"] == "network"


def test_errors_have_the_exit_codes_of_the_program() -> None:
    command = [sys.executable, "-m", "arb_ternary_bench.study", "nothing"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == UsageProblem("").exit_code == 2
    assert done.stderr.startswith("error: no study is called 'nothing'")
