"""Tables of measurements equal the committed results."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from arb_ternary_vision.starters import DIGITS

ROOT = Path(__file__).parents[2]


def test_the_tables_are_those_of_the_committed_results() -> None:
    script = ROOT / "docs" / "scripts" / "measurements.py"
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_readme_states_the_mean_loss_of_each_side() -> None:
    figures = json.loads((ROOT / "benchmarks" / "results" / "demo.json").read_text())
    readme = (ROOT / "README.md").read_text()
    report = (ROOT / "benchmarks" / "reports" / "demo.md").read_text()
    for row in figures["configs"]:
        mean = sum(row["validation_losses"]) / len(row["validation_losses"])
        pages = [readme, report] if row["name"] in ("demo", "bitnet", "float32") else [report]
        for page in pages:
            assert f"{mean:.3f} ±" in page
            assert f"{row['state_bits_per_parameter']:.2f}" in page


@pytest.mark.parametrize("config", ["demo.yaml", "plain.yaml", "bitnet.yaml", "float32.yaml"])
def test_demo_and_baselines_have_the_tuned_settings(
    config: str,
) -> None:
    tuning = json.loads((ROOT / "benchmarks" / "results" / "demo-tuning.json").read_text())
    losses: dict[str, float] = tuning["losses"][config]
    schedule, rate = min(losses, key=losses.__getitem__).split()
    text = (ROOT / "docs" / "examples" / config).read_text()
    assert f"lr_schedule: {schedule}\n" in text
    assert re.search(rf"^  lr: {re.escape(rate)}\b", text, re.MULTILINE)


def test_demo_with_float_ends_has_the_tuned_rates() -> None:
    tuning = json.loads((ROOT / "benchmarks" / "results" / "demo-tuning.json").read_text())
    losses: dict[str, float] = tuning["losses"]["float-ends.yaml"]
    schedule, votes, _, floats = min(losses, key=losses.__getitem__).split()
    example = yaml.safe_load((ROOT / "docs" / "examples" / "float-ends.yaml").read_text())
    assert example["phases"][0]["lr_schedule"] == schedule
    assert (example["optimizer"]["ternary"]["lr"], example["optimizer"]["float"]["lr"]) == (
        float(votes),
        float(floats),
    )


@pytest.mark.parametrize(
    ("method", "config"),
    [("pure", "digits"), ("qat", "digits-bitnet"), ("float32", "digits-float32")],
)
def test_the_digits_are_read_with_the_rates_that_tuning_chose(method: str, config: str) -> None:
    runs = json.loads((ROOT / "benchmarks" / "results" / "digits.json").read_text())["runs"]
    tried = [run for run in runs if run["method"] == method and run["tuning"]]
    assert len(tried) == 3
    best = max(tried, key=lambda run: (run["accuracy"], -run["loss"]))["rate"]
    assert {run["rate"] for run in runs if run["method"] == method and not run["tuning"]} == {best}
    example = yaml.safe_load((ROOT / "docs" / "examples" / f"{config}.yaml").read_text())
    assert (example["optimizer"] if method == "pure" else example["phases"][0])["lr"] == best


def test_the_starter_of_digits_is_the_example() -> None:
    example = yaml.safe_load((ROOT / "docs" / "examples" / "digits.yaml").read_text())
    for key in ("data", "masking", "model", "optimizer", "checks"):
        assert DIGITS[key] == example[key]
    assert DIGITS["phases"][0].items() <= example["phases"][0].items()


RESULTS_PAGE = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
RESULTS_SECTIONS = [
    section for section in RESULTS_PAGE.split("\n## ") if "|---" in section and "Report:" in section
]


@pytest.mark.parametrize(
    "section", RESULTS_SECTIONS, ids=[section.splitlines()[0] for section in RESULTS_SECTIONS]
)
def test_figures_of_the_results_page_are_in_the_report(section: str) -> None:
    report = re.findall(r"\(\.\./([^)#]+)(?:#[^)]*)?\)", section.partition("Report:")[2])[0]
    text = (ROOT / report).read_text(encoding="utf-8")
    rows = re.findall(r"^\|(.*)\|$", section, flags=re.MULTILINE)
    for row in rows[2:]:
        for cell in row.split("|"):
            if re.fullmatch(r"[\d.,]+( ± [\d.,]+)?", cell.strip()):
                for figure in cell.split("±"):
                    assert figure.strip() in text, f"{figure} is not in {report}"
