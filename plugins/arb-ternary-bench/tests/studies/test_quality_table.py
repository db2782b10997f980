"""The table and the figures of a result that was written by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from arb_ternary.errors import ArbError
from arb_ternary_bench.studies.quality import TABLE, draw_frontier, draw_losses


def rule(
    name: str, losses: list[float | None], mean: float | None, **changes: Any
) -> dict[str, Any]:
    return {
        "name": name,
        "summary": "",
        "tuning": [{"settings": {}, "loss": 1.0, "failure": None}] * 4,
        "chosen": 0,
        "settings": {"optimizer": {"float": {"lr": 0.004}}, "phase": {"min_rate": 0.1}},
        "validation_losses": losses,
        "validation_loss_mean": mean,
        "validation_loss_stdev": None if mean is None else 0.0125,
        "parameters": 1_234_567,
        "state_bits_per_linear_weight": 10.125,
        "state_bits_per_parameter": 18.5,
        "stored_gradient_bytes": 4_423_680,
        "tokens_per_second": [15_000.0, 90.0, 14_000.0],
        "peak_bytes": [3 << 20, 500 << 20, 4 << 20],
        "curves": [[[2048, 4.0], [4096, 2.0]], [[2048, 5.0], [4096, 2.2]]],
        **changes,
    }


def result(*rules: dict[str, Any]) -> dict[str, Any]:
    return {
        "machine": {"processor": "a processor", "cores": 2, "torch": "2.13.0"},
        "size": "small",
        "tokens": 5_242_880,
        "tuning_tokens": 1_048_576,
        "seeds": [0, 1, 2],
        "jobs": 2,
        "threads": 1,
        "unigram_entropy": 3.354,
        "bigram_entropy": 2.449,
        "rules": list(rules),
    }


FAILED = {
    "chosen": None,
    "settings": None,
    "parameters": None,
    "state_bits_per_linear_weight": None,
    "validation_loss_stdev": None,
    "state_bits_per_parameter": None,
    "stored_gradient_bytes": None,
    "curves": [],
    "tokens_per_second": [],
    "peak_bytes": [],
}
EXAMPLE = result(
    rule("worse", [2.0, 2.1], 2.05),
    rule("hopeless", [], None, **FAILED),
    rule("better", [1.0, 1.5], 1.25),
)


def test_the_table_has_the_best_rule_first_and_failures_last() -> None:
    found = TABLE.rows(EXAMPLE)
    assert [row[0] for row in found] == ["better", "worse", "hopeless"]
    assert found[0] == (
        "better",
        "1.2500 ± 0.0125",
        "10.12",
        "18.50",
        "4,423,680",
        "1,234,567",
        "14,000",
        "500",
        "optimizer.float.lr 0.004, phase.min_rate 0.1",
    )
    assert found[2] == ("hopeless", "failed", "", "", "", "", "", "", "")
    assert all(len(row) == len(TABLE.columns) for row in found)


def test_one_seed_has_no_spread() -> None:
    assert TABLE.rows(result(rule("alone", [1.25], 1.25)))[0][1] == "1.2500"


def test_a_seed_that_failed_makes_the_rule_fail() -> None:
    assert TABLE.rows(result(rule("shaky", [1.0, None], None)))[0][1] == "failed"


def test_the_markdown_says_what_was_measured_on_what() -> None:
    text = TABLE.markdown(EXAMPLE)
    assert text.startswith("| rule | validation loss | state bits per linear weight |")
    assert (
        "| better | 1.2500 ± 0.0125 | 10.12 | 18.50 | 4,423,680 | 1,234,567 | 14,000 | 500 |"
        in text
    )
    assert (
        "standard deviation of 3 seeds, 5,242,880 tokens each; the settings are the best of 4 "
        "trials on" in text
    )
    assert (
        "bigram entropy of 2.449. 2 at once, 1 threads each, on a processor, 2 cores, torch 2.13.0."
        in text
    )


@pytest.mark.parametrize("draw", [draw_losses, draw_frontier])
@pytest.mark.parametrize("rules", [EXAMPLE["rules"], [rule("hopeless", [], None, **FAILED)], []])
def test_figures_are_drawn_of_whatever_there_is(
    draw: Any, rules: list[Any], tmp_path: Path
) -> None:
    draw(result(*rules), tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_twenty_rules_fit_into_the_figures(tmp_path: Path) -> None:
    many = result(*(rule(f"rule_{number}", [1.0], 1.0 + number / 1000) for number in range(20)))
    draw_losses(many, tmp_path / "loss.svg")
    draw_frontier(many, tmp_path / "frontier.svg")
    assert (tmp_path / "frontier.svg").stat().st_size > 10_000


def test_unwritable_figure_is_an_error_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(ArbError, match=r"nowhere/frontier\.png: the figure cannot be written"):
        draw_frontier(EXAMPLE, tmp_path / "nowhere" / "frontier.png")
