"""A result file gives back what was written to it, and a new one begins with what it is given."""

from __future__ import annotations

from pathlib import Path

from arb_ternary_bench.result_file import read_result, write_result


def test_a_study_goes_on_from_its_result_file_and_begins_anew_without_one(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    assert read_result(file, {"runs": {}}) == {"runs": {}}
    assert not file.exists()
    write_result(file, {"runs": {"seed 0": 1.5}})
    assert file.read_text(encoding="utf-8") == '{\n "runs": {\n  "seed 0": 1.5\n }\n}\n'
    assert read_result(file, {"runs": {}}) == {"runs": {"seed 0": 1.5}}
