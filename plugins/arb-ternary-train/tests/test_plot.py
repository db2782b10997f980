from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from arb_ternary.errors import ArbError
from arb_ternary_train.directory import RunDirectory
from arb_ternary_train.plot import Mark, draw_marks, marks_in, plot_runs, smoothed


def test_smoothing_is_a_centred_mean_cut_short_at_the_ends() -> None:
    assert smoothed([3.0, 3.0, 3.0], 1) == pytest.approx([3.0] * 3)
    assert smoothed([1.0, 2.0, 6.0, 4.0, 0.0], 2) == pytest.approx(
        [3.0, 3.25, 13.0 / 5, 3.0, 10.0 / 3]
    )


def test_the_figure_shows_training_validation_and_both_entropies(tiny: Any, tmp_path: Path) -> None:
    run, report = tiny.run("run")
    plot_runs([run], tmp_path / "deep" / "loss.svg")
    plot_runs([run], tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    drawn = (tmp_path / "deep" / "loss.svg").read_text()
    for words in (
        "training",
        "validation",
        f"unigram entropy {report.baselines['unigram_entropy']:.3f}",
        f"bigram entropy {report.baselines['bigram_entropy']:.3f}",
        "optimizer step",
        "loss, nats per token",
    ):
        assert f"<!-- {words} -->" in drawn


def test_several_runs_share_a_figure_under_their_names(tiny: Any, tmp_path: Path) -> None:
    runs = [tiny.run(name)[0] for name in ("first", "second")]
    runs[1].result_file.unlink()
    plot_runs(runs, tmp_path / "both.svg")
    drawn = (tmp_path / "both.svg").read_text()
    for words in ("first", "second", "first, validation", "first and second"):
        assert f"<!-- {words} -->" in drawn


def test_empty_run_and_unwritable_figure_are_errors(tiny: Any, tmp_path: Path) -> None:
    empty = RunDirectory(tmp_path / "empty")
    empty.path.mkdir()
    empty.metrics_file.write_text("")
    with pytest.raises(ArbError, match="no step has been taken yet"):
        plot_runs([empty], tmp_path / "loss.png")
    run, _ = tiny.run("run")
    with pytest.raises(ArbError, match="the figure cannot be written"):
        plot_runs([run], tmp_path / "loss.nonsense")


def test_records_with_a_mark_are_found_whatever_their_event() -> None:
    records = [
        {"event": "train", "step": 1, "loss": 2.0},
        {"event": "decision", "step": 10, "mark": "bold", "mark_kind": "switch"},
        {"event": "grown", "step": 20, "mark": "stack 2"},
        {"event": "decision", "step": 30, "to": "calm"},
    ]
    assert marks_in(records) == [Mark(10, "bold", "switch"), Mark(20, "stack 2", "grown")]


def test_marks_are_lines_and_kinds_are_legend_entries() -> None:
    axes = Figure().add_subplot()
    marks = [
        Mark(100, "bold", "switch"),
        Mark(400, "calm", "rollback"),
        Mark(405, "calm", "rollback"),
        Mark(700, "bold", "branch"),
        Mark(900, "a name that is much too long for a figure", "switch"),
    ]
    draw_marks(axes, [("#0072B2", marks)], 1000)
    lines = [line for line in axes.lines if list(line.get_xdata())]
    assert [list(line.get_xdata()) for line in lines] == [[mark.step] * 2 for mark in marks]
    assert [list(line.get_ydata()) for line in lines] == [[0, 1]] * 5
    assert all(line.get_linewidth() < 1 for line in lines)
    looks = [(line.get_color(), str(line.get_linestyle())) for line in lines]
    assert looks[0] == looks[4]
    assert len(set(looks)) == 3
    assert axes.get_legend_handles_labels()[1] == ["switch", "rollback", "branch"]
    # Of two that stand at almost the same place only the first has its text.
    texts = [(text.get_text(), text.xy[0]) for text in axes.texts]  # type: ignore[attr-defined]
    assert texts == [
        ("bold", 100),
        ("calm", 400),
        ("bold", 700),
        ("a name that is much too lon\N{HORIZONTAL ELLIPSIS}", 900),
    ]


def test_marks_of_several_runs_have_the_runs_colours() -> None:
    axes = Figure().add_subplot()
    draw_marks(
        axes,
        [("#0072B2", [Mark(1, "bold", "switch")]), ("#D55E00", [Mark(9, "calm", "switch")])],
        10,
    )
    assert [line.get_color() for line in axes.lines if list(line.get_xdata())] == [
        "#0072B2",
        "#D55E00",
    ]
    assert axes.get_legend_handles_labels()[1] == ["switch"]


def test_the_figure_of_a_run_shows_its_marks(tiny: Any, tmp_path: Path) -> None:
    run, _ = tiny.run("run")
    with run.metrics_file.open("a") as file:
        file.write(
            '{"event": "decision", "step": 2, "mark": "spike_resistant", "mark_kind": "rollback"}\n'
        )
    plot_runs([run], tmp_path / "loss.svg")
    drawn = (tmp_path / "loss.svg").read_text()
    for words in ("rollback", "spike_resistant"):
        assert f"<!-- {words} -->" in drawn
