"""compare.py: configs side by side."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from arb_ternary.errors import ArbError, UsageProblem
from compare import TABLE, compare, summarise

TINY = """
name: {name}
data: {{name: text, path: {text}, validation_fraction: 0.3}}
model: {{name: decoder, width: 16, layers: 1, heads: 2, feed_forward: 16, max_length: 16{model}}}
optimizer: {optimizer}
phases: [{{name: standard, steps: 2, batch_size: 2, block_size: 16}}]
"""


def write_configs(folder: Path) -> list[str]:
    text = folder / "text.txt"
    text.write_text("to be or not to be, that is the question. " * 20)
    floats = ", activations: float, float_parts: [embedding, head, norms, linears]"
    paths = []
    for name, model, optimizer in (("ternary", "", "sign_votes"), ("float", floats, "adamw")):
        path = folder / f"{name}.yaml"
        path.write_text(TINY.format(name=name, text=text, model=model, optimizer=optimizer))
        paths.append(str(path))
    return paths


def test_every_config_is_trained_with_the_same_seeds(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    command = [*write_configs(tmp_path), "--seeds", "1", "--out", str(out)]
    result = CliRunner().invoke(compare, command)
    assert result.exit_code == 0, result.output
    figures = json.loads(out.read_text())
    ternary, float32 = figures["configs"]
    assert (ternary["name"], float32["name"]) == ("ternary", "float")
    assert ternary["float_parameters"] == 0
    assert float32["parameters"] == float32["float_parameters"]
    # A float parameter and two moments of AdamW: 96 bits; one step counter per tensor on top.
    assert 96 <= float32["state_bits_per_parameter"] < 98
    assert ternary["tokens"] == float32["tokens"] == 2 * 2 * 16
    assert min(ternary["peak_bytes"] + float32["peak_bytes"]) > 10 * 2**20
    assert "(1.00x)" in result.output


def test_a_run_that_fails_shows_its_own_message(tmp_path: Path) -> None:
    broken = tmp_path / "broken.yaml"
    broken.write_text("name: broken\n")
    result = CliRunner().invoke(compare, [str(broken), "--seeds", "1"])
    assert isinstance(result.exception, ArbError)
    assert "ended with 2" in result.exception.what
    assert "phases" in result.exception.hint


def test_two_configs_of_one_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    paths = [tmp_path / "x.yaml", tmp_path / "a" / "x.yaml"]
    for path in paths:
        path.write_text("name: x\n")
    result = CliRunner().invoke(compare, [str(path) for path in paths])
    assert isinstance(result.exception, UsageProblem)


def test_means_and_deviations_are_those_of_the_seeds() -> None:
    audit = {"parameters": 1, "float_parameters": 0, "state_bytes": 1}
    reports = [
        {
            "validation_loss": loss,
            "tokens_per_second": speed,
            "peak_bytes": peak << 20,
            "audit": {**audit, "state_bits_per_parameter": 8.0},
            "tokens": 1,
            "unigram_entropy": 0.0,
            "bigram_entropy": 0.0,
        }
        for loss, speed, peak in ((1.0, 5.0, 1), (2.0, 50.0, 2), (3.0, 6.0, 3))
    ]
    row = summarise(Path("x.yaml"), reports)
    assert (row["name"], row["config"]) == ("x", "x.yaml")
    assert row["validation_loss_mean"] == 2.0
    assert row["validation_loss_stdev"] == pytest.approx(1.0)
    (shown,) = TABLE.rows({"configs": [row]})
    assert shown[1] == "2.0000 ± 1.0000"
    assert shown[-2:] == ("6 (1.00x)", "3 (1.00x)")
