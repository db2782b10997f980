"""The tables of measured figures say what the committed results say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_tables_are_those_of_the_committed_results() -> None:
    script = ROOT / "docs" / "scripts" / "measurements.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_readme_states_the_mean_loss_of_each_side() -> None:
    figures = json.loads((ROOT / "benchmarks" / "results" / "demo.json").read_text())
    readme = (ROOT / "README.md").read_text()
    for row in figures["configs"]:
        mean = sum(row["validation_losses"]) / len(row["validation_losses"])
        assert f"{mean:.3f} ±" in readme
        assert f"{row['state_bits_per_parameter']:.2f}" in readme


def test_the_demo_is_run_with_the_settings_that_tuning_chose() -> None:
    tuning = json.loads((ROOT / "benchmarks" / "results" / "demo-tuning.json").read_text())
    threshold = min(tuning["ternary_accum_threshold"].items(), key=lambda item: item[1])[0]
    rate = min(tuning["float32_lr"].items(), key=lambda item: item[1])[0]
    assert f"accum_threshold: {threshold} " in (ROOT / "demo" / "demo.yaml").read_text()
    assert f"lr: {rate}\n" in (ROOT / "demo" / "float32.yaml").read_text()
