"""Masked diffusion of text: pure ternary, quantisation-aware and float32, three seeds, beside left
to right.

    python plugins/arb-ternary-diffusion/studies/text_diffusion.py makes the runs that the result
    lacks python plugins/arb-ternary-diffusion/studies/text_diffusion.py --runs 1 one of them python
    plugins/arb-ternary-diffusion/studies/text_diffusion.py --table prints the result as tables

The configs are `docs/examples/text-diffusion*.yaml`, for 300 of their 800 steps. First each
learning rate is chosen between two, by runs as long on the training text without its last
twentieth, which judges them. Then each is trained with three seeds, and so is the pure one as a
model that writes from left to right (`causal: true`, `masking: causal`), at the rate that diffusion
chose. The validation text is read once, at the end of a run: the loss of all of it, for diffusion
an estimate of the upper bound with one time for each sample. A run that is in the file already is
not repeated; every finished run is written at once.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Final

from arb_ternary_bench.compare import machine_facts

ROOT: Final = Path(__file__).parents[3]
RESULT: Final = Path(__file__).parents[1] / "results" / "text-diffusion.json"
COMMAND: Final = "python plugins/arb-ternary-diffusion/studies/text_diffusion.py"
SEEDS: Final = (0, 1, 2)
#: By name: the config, and the learning rates to choose among.
MODELS: Final[Mapping[str, tuple[str, tuple[float, ...]]]] = {
    "pure ternary": ("text-diffusion", (0.1, 0.2)),
    "QAT (BitNet)": ("text-diffusion-bitnet", (0.004, 0.008)),
    "float32": ("text-diffusion-float32", (0.004, 0.008)),
}
#: How the tokens are asked for, and what that changes in a config.
WAYS: Final[Mapping[str, tuple[str, ...]]] = {
    "diffusion": (),
    "left to right": ("masking=causal", "model.causal=true"),
}
#: Ways and models that are trained.
ROWS: Final = (*(("diffusion", model) for model in MODELS), ("left to right", "pure ternary"))
STEPS: Final = 300
#: Of 8 samples, in the judgement of a rate.
TUNING_BATCHES: Final = 96


def run(model: str, way: str, *overrides: str) -> dict[str, Any]:
    """The result of one run."""
    length = (
        f"phases.0.steps={STEPS}",
        f"phases.0.eval_every={STEPS}",
        f"phases.0.warmup_steps={STEPS // 20}",
    )
    config = ROOT / "docs" / "examples" / f"{MODELS[model][0]}.yaml"
    with tempfile.TemporaryDirectory(prefix="arb-text-diffusion-") as folder:
        command = [
            sys.executable,
            "-m",
            "arb_ternary",
            "train",
            str(config),
            "--json",
            "--run-dir",
            f"{folder}/run",
        ]
        for override in (
            "backend=cpu",
            "threads=1",
            "checkpoint.every=0",
            *length,
            *WAYS[way],
            *overrides,
        ):
            command += ["-o", override]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    if done.returncode:
        sys.exit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def tune(model: str, rate: float) -> float:
    """The loss of diffusion on the end of the training text."""
    overrides = (
        f"optimizer.lr={rate}",
        "data.tuning=true",
        f"phases.0.eval_batches={TUNING_BATCHES}",
    )
    return float(run(model, "diffusion", *overrides)["validation_loss"])


def train(model: str, way: str, rate: float, seed: int) -> dict[str, float]:
    """The loss on the validation text, and what is stored."""
    found = run(model, way, f"optimizer.lr={rate}", f"seed={seed}")
    audit = found["audit"]
    return {
        "loss": found["validation_loss"],
        "tokens": found["tokens"],
        "parameters": audit["parameters"],
        "state_bits_per_parameter": audit["state_bits_per_parameter"],
        "state_bytes": audit["state_bytes"],
        "float_parameters": audit["float_parameters"],
    }


def missing(result: Mapping[str, Any]) -> Iterator[tuple[str, str, float, int | None]]:
    """The runs that are to be made: way, model, rate, and the seed or None where the rate is
    tried.
    """
    for model, (_, rates) in MODELS.items():
        for rate in rates:
            if str(rate) not in result["tuning"].get(model, {}):
                yield "diffusion", model, rate, None
    for way, model in ROWS:
        for seed in SEEDS:
            if str(seed) not in result["runs"].get(f"{way}, {model}", {}):
                tried = result["tuning"][model]
                yield way, model, float(min(tried, key=tried.__getitem__)), seed


def table(result: Mapping[str, Any]) -> str:
    """Means and standard deviations in Markdown."""
    rows = [
        "| | rate | nats a byte | | state, bits a parameter | bytes |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, runs in result["runs"].items():
        losses = [each["loss"] for each in runs.values()]
        tried = result["tuning"][name.partition(", ")[2]]
        one = next(iter(runs.values()))
        spread = f"± {stdev(losses):.3f}" if len(losses) > 1 else ""
        bits = one["state_bits_per_parameter"]
        stored = one["state_bytes"]
        best = min(tried, key=tried.__getitem__)
        bound = "at most " * name.startswith("diffusion")
        rows.append(
            f"| {name} | {best} | {bound}{fmean(losses):.3f} | {spread} | {bits:.2f} | {stored:,} |"
        )
    return "\n".join(rows)


def main() -> None:
    """Make what is missing, or print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, help="most runs to make; default: all")
    parser.add_argument("--table", action="store_true", help="print the result")
    arguments = parser.parse_args()
    result: dict[str, Any] = {
        "command": COMMAND,
        "machine": machine_facts(),
        "tuning": {},
        "runs": {},
    }
    if RESULT.exists():
        result = json.loads(RESULT.read_text(encoding="utf-8"))
    if arguments.table:
        print(table(result))
        return
    made = 0
    while (found := next(missing(result), None)) and made != arguments.runs:
        way, model, rate, seed = found
        name = f"{way}, {model}"
        if seed is None:
            result["tuning"].setdefault(model, {})[str(rate)] = loss = tune(model, rate)
            print(f"{name}, rate {rate}: {loss:.4f}", flush=True)
        else:
            result["runs"].setdefault(name, {})[str(seed)] = measured = train(
                model, way, rate, seed
            )
            print(f"{name}, seed {seed}: {measured['loss']:.4f}", flush=True)
        made += 1
        RESULT.parent.mkdir(parents=True, exist_ok=True)
        RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
