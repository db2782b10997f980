"""What each preset of an architecture costs against a decoder of none: sizes, data, steps of
``plain.yaml``, 3 seeds.

    python plugins/arb-ternary-bench/studies/presets.py --out
    plugins/arb-ternary-bench/results/presets.json

``sub_norms`` has norms of queries and keys and sub-norms besides, which is no preset; ``qwen3`` is
that file's. Hidden sizes are such that all have its number of weights, within 2 %; the tied bitnet
has one table for embedding and head, and wider feed-forward layers in its place. A run that is in
the file already is not repeated; every finished run is written at once.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from arb_ternary_bench.compare import machine_facts
from arb_ternary_bench.result_file import read_result, write_result

PLAIN = Path(__file__).parents[3] / "docs" / "examples" / "plain.yaml"
SEEDS = (0, 1, 2)
#: What each has in place of that file's options; null gives an option back to the preset.
MODELS: dict[str, dict[str, Any]] = {
    "sub_norms": {"architecture": None, "activation": "swiglu", "query_key_norm": True},
    "llama": {"architecture": "llama", "activation": None, "query_key_norm": None},
    "qwen3": {"architecture": "qwen3", "activation": None, "query_key_norm": None},
    "arcee": {
        "architecture": "arcee",
        "activation": None,
        "query_key_norm": None,
        "feed_forward": 384,
    },
    "bitnet": {
        "architecture": "bitnet",
        "activation": None,
        "query_key_norm": None,
        "feed_forward": 288,
    },
}
#: Help of an option.
CHOICE = f"run only these of {', '.join(MODELS)} (default: all)"


def trained(model: str, seed: int, steps: int) -> dict[str, float]:
    """Validation loss in nats a byte and number of weights of one run, on the cpu backend with one
    thread.
    """
    overrides = {
        "seed": seed,
        "threads": 1,
        "phases.0.steps": steps,
        "phases.0.warmup_steps": min(100, steps),
        **{f"model.{key}": value for key, value in MODELS[model].items()},
    }
    with tempfile.TemporaryDirectory() as directory:
        command = [
            sys.executable,
            "-m",
            "arb_ternary.cli.main",
            "train",
            str(PLAIN),
            "--json",
            "--backend",
            "cpu",
        ]
        command += ["--run-dir", f"{directory}/run"]
        for key, value in overrides.items():
            command += ["-o", f"{key}={json.dumps(value)}"]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    report = json.loads(done.stdout)
    return {
        "validation_loss": report["validation_loss"],
        "weights": report["audit"]["ternary_weights"],
    }


def summary(runs: dict[str, dict[str, float]]) -> dict[str, float]:
    """Mean and standard deviation of the validation losses of one model."""
    losses = [run["validation_loss"] for run in runs.values()]
    spread = statistics.stdev(losses) if len(losses) > 1 else 0.0
    return {"mean": statistics.fmean(losses), "standard_deviation": spread, "runs": len(losses)}


def main() -> None:
    """Run what is missing, one seed of every model before the next."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--steps", type=int, default=2400, help="optimizer steps of each run (default: %(default)s)"
    )
    parser.add_argument(
        "--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="MODEL", help=CHOICE
    )
    arguments = parser.parse_args()
    out: Path = arguments.out
    command = f"python plugins/arb-ternary-bench/studies/presets.py --steps {arguments.steps}"
    if arguments.models != list(MODELS):
        command += " --models " + " ".join(arguments.models)
    new = {"command": command, "machine": machine_facts(), "steps": arguments.steps, "models": {}}
    result = read_result(out, new)
    if result["steps"] != arguments.steps:
        parser.error(
            f"{out} holds runs of {result['steps']} steps: give --steps {result['steps']}, or "
            f"another --out"
        )
    for seed in SEEDS:
        for name in arguments.models:
            found = result["models"].setdefault(name, {"changes": MODELS[name], "runs": {}})
            if str(seed) in found["runs"]:
                continue
            found["runs"][str(seed)] = run = trained(name, seed, arguments.steps)
            found["summary"] = summary(found["runs"])
            print(
                f"{name}, seed {seed}: {run['validation_loss']:.4f} with {run['weights']:,} "
                f"weights",
                flush=True,
            )
            write_result(out, result)


if __name__ == "__main__":
    main()
