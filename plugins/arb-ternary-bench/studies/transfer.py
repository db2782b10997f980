"""Whether one rate serves models of every width: pure-ternary decoders of widths 64 to 1024, each
with several rates.

    python plugins/arb-ternary-bench/studies/transfer.py --out
    plugins/arb-ternary-bench/results/transfer.json

Losses are those of the end of the training text. A run that is in the file already is not repeated;
every finished run is written at once. Draws the losses beside the file.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

from arb_ternary_bench.compare import machine_facts
from arb_ternary_bench.result_file import read_result, write_result

BASE = Path(__file__).with_name("transfer.yaml")
WIDTHS = (64, 128, 256, 512, 1024)
RATES = (0.05, 0.1, 0.2, 0.4)
HEAD = 64


def loss(width: int, rate: float) -> float:
    """The loss of one run on the end of the training text, in nats a byte."""
    settings = {"width": width, "heads": width // HEAD, "feed_forward": 2 * width}
    overrides = [f"model.{key}={value}" for key, value in settings.items()] + [
        f"optimizer.lr={rate}"
    ]
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "arb_ternary.cli.main", "train", str(BASE), "--json"]
        command += ["--run-dir", f"{directory}/run"]
        for override in overrides:
            command += ["-o", override]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(json.loads(done.stdout)["validation_loss"])


def draw(runs: dict[str, dict[str, float]], path: Path) -> None:
    """Loss over rate, a line a width."""
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for width, losses in runs.items():
        points = sorted((float(rate), value) for rate, value in losses.items())
        axes.plot(*zip(*points, strict=True), marker="o", label=width)
    axes.set_xscale("log", base=2)
    axes.set_xticks(RATES, [str(rate) for rate in RATES])
    axes.set_xlabel("rate of scaled_votes, trits a step")
    axes.set_ylabel("loss after 200 steps, nats a byte")
    axes.legend(title="width", loc="lower left")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def main() -> None:
    """Run what is missing, narrow models first."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    out: Path = parser.parse_args().out
    command = "python plugins/arb-ternary-bench/studies/transfer.py"
    result = read_result(out, {"command": command, "machine": machine_facts(), "runs": {}})
    for width in WIDTHS:
        losses = result["runs"].setdefault(str(width), {})
        for rate in RATES:
            if str(rate) not in losses:
                losses[str(rate)] = loss(width, rate)
                print(f"width {width}, rate {rate}: {losses[str(rate)]:.4f}", flush=True)
                write_result(out, result)
    draw(result["runs"], out.with_suffix(".png"))


if __name__ == "__main__":
    main()
