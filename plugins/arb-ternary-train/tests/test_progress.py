from __future__ import annotations

import io
from pathlib import Path

import pytest

from arb_ternary_train.progress import (
    LogFile,
    PlainReporter,
    RichReporter,
    format_bytes,
    format_duration,
    make_reporter,
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.2, "0s"),
        (59.4, "59s"),
        (59.6, "1m00s"),
        (61, "1m01s"),
        (3600, "1h00m"),
        (11_220, "3h07m"),
    ],
)
def test_durations_read_as_people_write_them(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (20 << 20, "20.0 MiB"),
        (1 << 30, "1.0 GiB"),
        (1 << 41, "2048.0 GiB"),
    ],
)
def test_bytes_are_in_the_largest_unit_that_fits(number: int, text: str) -> None:
    assert format_bytes(number) == text


def test_a_terminal_gets_a_bar_and_anything_else_plain_lines() -> None:
    assert isinstance(make_reporter(stream=Terminal()), RichReporter)
    assert isinstance(make_reporter(stream=io.StringIO()), PlainReporter)


def test_plain_lines_show_logged_steps_and_every_note(tmp_path: Path) -> None:
    stream = io.StringIO()
    log = LogFile(tmp_path / "logs" / "train.log")
    reporter = PlainReporter(log, stream)
    reporter.start("standard", 100, 0)
    reporter.step(1, {"loss": 2.34567, "flips": 12}, log=False)
    reporter.step(10, {"loss": 1.25, "flips": 3, "tok/s": 1200}, log=True)
    reporter.note("step 10: validation loss 1.3000")
    reporter.stop()
    log.close()
    lines = stream.getvalue().splitlines()
    assert lines[0] == "standard: step 0 of 100"
    assert lines[1].startswith("standard 10/100  loss 1.2500  flips 3  tok/s 1200  left ")
    assert lines[2] == "step 10: validation loss 1.3000"
    assert len(lines) == 3
    logged = (tmp_path / "logs" / "train.log").read_text().splitlines()
    assert [line[20:] for line in logged] == [
        "standard: step 0 of 100",
        "step 10  loss 1.2500  flips 3  tok/s 1200",
        "step 10: validation loss 1.3000",
    ]


def test_the_bar_shows_loss_speed_flips_and_the_time_left(
    capsys: pytest.CaptureFixture[str],
) -> None:
    reporter = RichReporter()
    reporter.start("standard", 100, 0)
    reporter.note("a note before")
    reporter.step(50, {"loss": 1.5, "flips": 7, "tok/s": 900}, log=False)
    reporter.stop()
    reporter.note("a note after")
    shown = capsys.readouterr().err
    for words in (
        "a note before",
        "50/100",
        "loss 1.5000",
        "flips 7",
        "tok/s 900",
        "left",
        "a note after",
    ):
        assert words in shown


def test_a_log_file_is_continued_not_replaced(tmp_path: Path) -> None:
    for text in ("first", "second"):
        log = LogFile(tmp_path / "train.log")
        log.line(text)
        log.close()
    assert [line[20:] for line in (tmp_path / "train.log").read_text().splitlines()] == [
        "first",
        "second",
    ]


def test_a_long_evaluation_says_how_far_it_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 4.0, 5.5, 6.0, 11.0])
    monkeypatch.setattr("arb_ternary_train.progress.time.monotonic", lambda: next(clock))
    stream = io.StringIO()
    reporter = PlainReporter(None, stream)
    for done in range(1, 6):
        reporter.evaluating(done)
    assert stream.getvalue().splitlines() == [
        "evaluating: 3 batches done",
        "evaluating: 5 batches done",
    ]


def test_the_bar_says_that_it_evaluates(capsys: pytest.CaptureFixture[str]) -> None:
    reporter = RichReporter()
    reporter.start("standard", 100, 0)
    reporter.evaluating(12)
    reporter.stop()
    assert "evaluating: 12 batches done" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("columns", "shown", "left_out"),
    [
        (40, ("50/100", "━", "left ", "loss 1.5000"), ("standard", "flips")),
        (80, ("standard", "50/100", "━", "left ", "loss 1.5000", "flips 7"), ("tok/s",)),
        (110, ("standard", "50/100", "━", "left ", "loss 1.5000", "flips 7", "tok/s 900"), ("…",)),
    ],
)
def test_step_bar_and_time_stay_on_a_narrow_terminal(
    columns: int,
    shown: tuple[str, ...],
    left_out: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    reporter = RichReporter()
    reporter.start("standard", 100, 0)
    metrics = {"loss": 1.5, "flips": 7, "rate": 0.1416, "grad_norm": 5.063, "tok/s": 900}
    reporter.step(50, metrics, log=False)
    reporter.stop()
    line = capsys.readouterr().err.splitlines()[-1]
    assert len(line.rstrip()) <= columns
    for words in shown:
        assert words in line
    for words in left_out:
        assert words not in line
