"""What votes of three levels cost in learning, and what clipping once a step changed; three seeds
each.

    python plugins/arb-ternary-votes/studies/levels.py --study small measures what the result lacks
    python plugins/arb-ternary-votes/studies/levels.py --study small --table prints the result as a
    table

``small`` is a pure ternary decoder of 115,000 weights, ``demo`` one of the sizes of
``docs/examples/demo.yaml``, with sub-norms, on fewer tokens. A step has as many samples however
many micro-batches it is divided into, and runs differ in nothing but the setting that a row names.
No rate is tuned anew. The loss is that of all validation text, which is read once, after the last
step. A run that is in the file already is not repeated; every finished run is written at once. Runs
with 16 micro-batches have half the steps.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Final

from arb_ternary_bench.compare import machine_facts

RESULTS: Final = Path(__file__).parents[1] / "results"
SEEDS: Final = (0, 1, 2)
#: Samples of a step, which every number of micro-batches below divides.
SAMPLES: Final = 16
MICRO_BATCHES: Final = (1, 4, 16)
#: By bits of an accumulator: options of the rule.
RULES: Final[Mapping[int, dict[str, Any]]] = {
    8: {"lr": 0.1},
    4: {"lr": 0.1, "carry": False},
    2: {"lr": 0.02},
}
DECODER: Final = {
    "name": "decoder",
    "heads": 4,
    "activation": "swiglu",
    "query_key_norm": True,
    "group_size": "row",
    "scale_rule": "frozen",
    "embedding_scale_rule": "frozen",
    "logit_scale": 1,
}
#: By name: the decoder's sizes, predictions of a sample, and steps.
STUDIES: Final[Mapping[str, tuple[dict[str, int], int, int]]] = {
    "small": ({"width": 64, "layers": 2, "feed_forward": 128, "max_length": 64}, 64, 400),
    "demo": ({"width": 128, "layers": 3, "feed_forward": 256, "max_length": 128}, 128, 400),
}


def variants(study: str) -> dict[str, tuple[int, int, dict[str, Any]]]:
    """By name: bits of an accumulator, micro-batches, and options of the rule."""
    found: dict[str, tuple[int, int, dict[str, Any]]] = {}
    for count in MICRO_BATCHES:
        found[f"8 bits, n = {count}"] = (8, count, {})
        found[f"8 bits, n = {count}, vote_levels 3"] = (8, count, {"vote_levels": 3})
    for bits in (4, 2) if study == "small" else ():
        found[f"{bits} bits, n = 4"] = (bits, 4, {})
    return found


def config_of(
    study: str, bits: int, count: int, options: Mapping[str, Any], seed: int
) -> dict[str, Any]:
    """The config of one run."""
    sizes, block, steps = STUDIES[study]
    steps = steps // 2 if count == max(MICRO_BATCHES) else steps
    return {
        "name": "levels",
        "seed": seed,
        "threads": 1,
        "backend": "cpu",
        "data": {"name": "shakespeare", "tokenizer": "bytes"},
        "model": {**DECODER, **sizes, "vote_bits": bits},
        "optimizer": {"name": "scaled_votes", **RULES[bits], **options},
        "phases": [
            {
                "name": "standard",
                "steps": steps,
                "batch_size": SAMPLES // count,
                "gradient_accumulation_steps": count,
                "block_size": block,
                "lr_schedule": "linear",
                "warmup_steps": steps // 20,
                "eval_every": steps,
                "log_every": steps,
            }
        ],
        "checkpoint": {"every": 0},
    }


def measure(config: Mapping[str, Any]) -> float:
    """The validation loss of one run, in nats a byte."""
    with tempfile.TemporaryDirectory(prefix="arb-levels-") as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(json.dumps(config), encoding="utf-8")
        command = [sys.executable, "-m", "arb_ternary.cli.main", "train", str(file), "--json"]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [*command, "--run-dir", f"{folder}/run"],
            check=False,
            capture_output=True,
            text=True,
            env=environment,
        )
    if done.returncode:
        sys.exit(done.stderr)
    return float(json.loads(done.stdout)["validation_loss"])


def table(result: Mapping[str, Any]) -> str:
    """Means and standard deviations in Markdown, and the difference to the rule without
    ``vote_levels``, seed by seed.

    The last column is the mean of the differences and its standard error.
    """
    runs: Mapping[str, Mapping[str, float]] = result["runs"]
    rows = ["| | seeds | validation loss | | difference |", "|---|---:|---:|---:|---:|"]
    for name, losses in runs.items():
        if len(losses) < 2:
            continue
        plain = runs.get(name.partition(", vote_levels")[0], {})
        pairs = [loss - plain[seed] for seed, loss in losses.items() if seed in plain]
        told = ""
        if "vote_levels" in name and len(pairs) > 1:
            told = f"{fmean(pairs):+.3f} ± {stdev(pairs) / len(pairs) ** 0.5:.3f}"
        values = losses.values()
        rows.append(
            f"| {name} | {len(losses)} | {fmean(values):.3f} | ± {stdev(values):.3f} | {told} |"
        )
    return "\n".join(rows)


def main() -> None:
    """Measure what is missing, seed by seed, or print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--study", choices=STUDIES, required=True)
    parser.add_argument("--only", nargs="*", help="names of rows to measure; default: all")
    parser.add_argument(
        "--out", type=Path, help="default: results/levels-STUDY.json of this plugin"
    )
    parser.add_argument("--table", action="store_true", help="print the result")
    arguments = parser.parse_args()
    out: Path = arguments.out or RESULTS / f"levels-{arguments.study}.json"
    command = f"python plugins/arb-ternary-votes/studies/levels.py --study {arguments.study}"
    result: dict[str, Any] = {"command": command, "machine": machine_facts(), "runs": {}}
    if out.exists():
        result = json.loads(out.read_text(encoding="utf-8"))
    if arguments.table:
        print(table(result))
        return
    wanted = variants(arguments.study)
    if unknown := sorted(set(arguments.only or wanted) - set(wanted)):
        parser.error(f"no such row: {', '.join(unknown)}; there are: {'; '.join(wanted)}")
    for seed in SEEDS:
        for name in arguments.only or wanted:
            losses = result["runs"].setdefault(name, {})
            if str(seed) not in losses:
                losses[str(seed)] = measure(config_of(arguments.study, *wanted[name], seed))
                print(f"{name}, seed {seed}: {losses[str(seed)]:.4f}", flush=True)
                out.parent.mkdir(parents=True, exist_ok=True)
                out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
