from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from arb_ternary.errors import ArbError
from arb_ternary_train.directory import RunDirectory
from arb_ternary_train.plot import plot_losses, smoothed


def test_smoothing_is_a_centred_mean_cut_short_at_the_ends() -> None:
    assert smoothed([3.0, 3.0, 3.0], 1) == pytest.approx([3.0] * 3)
    assert smoothed([1.0, 2.0, 6.0, 4.0, 0.0], 2) == pytest.approx([3.0, 3.25, 13.0 / 5, 3.0, 10.0 / 3])


def test_the_figure_shows_training_validation_and_both_entropies(tiny: Any, tmp_path: Path) -> None:
    run, report = tiny.run("run")
    plot_losses([run], tmp_path / "deep" / "loss.svg")
    plot_losses([run], tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    drawn = (tmp_path / "deep" / "loss.svg").read_text()
    for words in (
        "training",
        "validation",
        f"unigram entropy {report.baselines['unigram_entropy']:.3f}",
        f"bigram entropy {report.baselines['bigram_entropy']:.3f}",
        "optimizer step",
        "loss, nats a token",
    ):
        assert f"<!-- {words} -->" in drawn


def test_several_runs_share_a_figure_under_their_names(tiny: Any, tmp_path: Path) -> None:
    runs = [tiny.run(name)[0] for name in ("first", "second")]
    runs[1].result_file.unlink()
    plot_losses(runs, tmp_path / "both.svg")
    drawn = (tmp_path / "both.svg").read_text()
    for words in ("first", "second", "first, validation", "first and second"):
        assert f"<!-- {words} -->" in drawn


def test_a_run_without_a_step_and_a_place_that_cannot_be_written_are_errors(tiny: Any, tmp_path: Path) -> None:
    empty = RunDirectory(tmp_path / "empty")
    empty.path.mkdir()
    empty.metrics_file.write_text("")
    with pytest.raises(ArbError, match="no step has been taken yet"):
        plot_losses([empty], tmp_path / "loss.png")
    run, _ = tiny.run("run")
    with pytest.raises(ArbError, match="the figure cannot be written"):
        plot_losses([run], tmp_path / "loss.nonsense")
