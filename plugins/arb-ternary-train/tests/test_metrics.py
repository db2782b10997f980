from __future__ import annotations

import json
from pathlib import Path

import pytest

from arb_ternary.errors import ArbError
from arb_ternary_train.metrics import MetricsWriter, read_metrics, to_line


def records(*steps: int) -> list[dict[str, object]]:
    return [{"event": "train", "step": step, "loss": 1.0 / step} for step in steps]


def write(path: Path, *steps: int) -> int:
    with MetricsWriter(path) as writer:
        for record in records(*steps):
            writer.write(record)
        return writer.sync()


def test_records_are_read_back_exactly(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    length = write(path, 1, 3, 7)
    assert read_metrics(path) == records(1, 3, 7)
    assert length == path.stat().st_size


def test_numbers_that_json_does_not_have_become_words() -> None:
    line = to_line(
        {"loss": float("nan"), "norms": [float("inf"), 1.0], "nested": {"a": float("-inf")}}
    )
    assert json.loads(line) == {"loss": "nan", "norms": ["inf", 1.0], "nested": {"a": "-inf"}}


def test_a_line_reaches_the_file_before_write_returns(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write({"step": 1})
        assert path.read_bytes() == b'{"step": 1}\n'


def test_torn_line_is_ignored_and_cut_on_reopening(
    tmp_path: Path,
) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 1, 2)
    with path.open("ab") as file:
        file.write(b'{"step": 3, "lo')
    assert read_metrics(path) == records(1, 2)
    write(path, 3)
    assert read_metrics(path) == records(1, 2, 3)


def test_resume_cuts_the_file_to_the_recorded_length(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    length = write(path, 1, 2)
    write(path, 3, 4)
    with MetricsWriter(path, resume_at=length, resume_step=2) as writer:
        for record in records(3, 4):
            writer.write(record)
    assert read_metrics(path) == records(1, 2, 3, 4)


def test_resume_of_an_edited_file_drops_later_steps(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 2, 3)
    with MetricsWriter(path, resume_at=10_000, resume_step=2):
        pass
    assert read_metrics(path) == records(2)
    with MetricsWriter(path, resume_at=5, resume_step=2):
        pass
    assert read_metrics(path) == records(2)


def test_a_run_that_starts_anew_starts_with_an_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 1, 2)
    MetricsWriter(path, resume_at=0).close()
    assert path.read_bytes() == b""


def test_damaged_line_is_an_error_with_its_number(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(ArbError, match=r"metrics\.jsonl:2: not a JSON object"):
        read_metrics(path)
    path.write_text("[1]\n")
    with pytest.raises(ArbError, match=r"metrics\.jsonl:1: not a JSON object"):
        read_metrics(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArbError, match="there is no such file"):
        read_metrics(tmp_path / "metrics.jsonl")


def test_a_full_disk_is_an_error_that_names_the_file() -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("needs /dev/full")
    writer = MetricsWriter.__new__(MetricsWriter)
    writer.path = full
    writer._file = full.open("wb", buffering=0)
    with writer, pytest.raises(ArbError, match=r"/dev/full: cannot be written: .*No space left"):
        writer.write({"step": 1})
