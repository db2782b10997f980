"""What is aggressive and what is conservative for votes: one setting at a time, on the built-in
text.

    python plugins/arb-ternary-orchestrator/studies/votes.py measures what the result lacks python
    plugins/arb-ternary-orchestrator/studies/votes.py --table prints the result as a table

A pure ternary decoder of 115,000 weights, three seeds, every variant on the same 3,200 samples.
Losses are those of the training stream, of samples that the model has not seen before; nothing is
held out, and nothing has to be.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Final

from arb_ternary.config.yaml_document import Document
from arb_ternary.plugins.manager import manager
from arb_ternary_train.audit import audit
from arb_ternary_train.build import built_module
from arb_ternary_train.loading import structure_run
from arb_ternary_train.progress import Silent
from arb_ternary_train.runner import RunRequest, train

RESULT: Final = Path(__file__).parents[1] / "results" / "votes.json"
SEEDS: Final = (0, 1, 2)
MICRO_BATCHES: Final = 400
#: Micro-batches that the early and the last loss are means of.
EARLY: Final = range(40, 80)
LAST: Final = 40

MODEL: Final = {
    "name": "decoder",
    "width": 64,
    "layers": 2,
    "heads": 4,
    "feed_forward": 128,
    "activation": "swiglu",
    "query_key_norm": True,
    "max_length": 64,
    "group_size": "row",
    "scale_rule": "frozen",
    "embedding_scale_rule": "frozen",
    "logit_scale": 1,
}


def variants() -> dict[str, tuple[dict[str, Any], int]]:
    """By name: the optimizer, and micro-batches a step."""
    found: dict[str, tuple[dict[str, Any], int]] = {}

    def add(name: str, rule: str, accumulation: int = 1, **options: Any) -> None:
        found[f"{rule}: {name}"] = ({"name": rule, **options}, accumulation)

    add("as configured", "scaled_votes")
    for factor in (0.25, 0.5, 2.0, 4.0):
        add(f"rate x {factor:g}", "scaled_votes", lr=0.1 * factor)
    for clip in (1.0, 4.0):
        add(f"clip {clip:g}", "scaled_votes", clip=clip)
    for leak in (0.0, 0.08, 0.3):
        add(f"leak {leak:g}", "scaled_votes", leak=leak)
    add("carry off", "scaled_votes", carry=False)
    add("batch x 4", "scaled_votes", 4)
    add("rate x 4, clip 1", "scaled_votes", lr=0.4, clip=1.0)
    add("rate x 4, leak 0.08", "scaled_votes", lr=0.4, leak=0.08)
    add("rate x 4, carry off", "scaled_votes", lr=0.4, carry=False)
    add("rate x 4, batch x 4", "scaled_votes", 4, lr=0.4)
    add("as configured", "sign_votes")
    for factor in (0.25, 0.5, 2.0, 4.0):
        add(f"rate x {factor:g}", "sign_votes", lr=factor)
    for leak in (4, 16):
        add(f"leak {leak}", "sign_votes", leak=leak)
    add("rate x 4, leak 4", "sign_votes", lr=4.0, leak=4)
    return found


def measure(optimizer: Mapping[str, Any], accumulation: int, seed: int) -> dict[str, float]:
    """One run: its early and its last loss, the worst rise of a mean of 20 steps, and the share of
    trits a step.
    """
    steps = MICRO_BATCHES // accumulation
    phase = {
        "name": "standard",
        "steps": steps,
        "batch_size": 8,
        "block_size": 64,
        "lr_schedule": "linear",
        "warmup_steps": 24 // accumulation,
        "gradient_accumulation_steps": accumulation,
        "eval_every": 0,
    }
    data = {"name": "shakespeare", "tokenizer": "bytes"}
    settings = {
        "seed": seed,
        "data": data,
        "model": MODEL,
        "optimizer": dict(optimizer),
        "phases": [phase],
        "checkpoint": {"every": 0},
    }
    config = structure_run(Document(settings), manager().registry).config
    weights = audit(built_module(config.model, 256)).ternary_weights
    with tempfile.TemporaryDirectory(prefix="arb-votes-") as folder:
        train(config, RunRequest(directory=Path(folder) / "run", reporter=Silent))
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    records = [record for record in map(json.loads, lines) if record["event"] == "train"]
    losses = [record["loss"] for record in records for _ in range(accumulation)]
    means = [fmean(losses[end - 20 : end]) for end in range(20, len(losses) + 1)]
    return {
        "early": fmean(losses[index] for index in EARLY),
        "last": fmean(losses[-LAST:]),
        "rise": max(means[end] - min(means[: end + 1]) for end in range(len(means))),
        "flips": fmean(record["flips"] / weights for record in records),
    }


def table(result: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """The result in Markdown: means over the seeds, and the standard deviation of the last loss."""
    rows = [
        "| rule and setting | seeds | early loss | last loss | | worst rise | trits that flip a "
        "step |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name in variants():
        runs = list(result.get(name, {}).values())
        if len(runs) < 2:
            continue
        mean = {key: fmean(run[key] for run in runs) for key in runs[0]}
        spread = stdev(run["last"] for run in runs)
        rows.append(
            f"| {name} | {len(runs)} | {mean['early']:.3f} | {mean['last']:.3f} | ± {spread:.3f} | "
            f"{mean['rise']:.3f} | {mean['flips']:.2%} |"
        )
    return "\n".join(rows)


def main() -> None:
    """Measure what is missing, seed by seed, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", action="store_true", help="print the result")
    arguments = parser.parse_args()
    result: dict[str, dict[str, dict[str, float]]] = (
        json.loads(RESULT.read_text()) if RESULT.exists() else {}
    )
    if arguments.table:
        print(table(result))
        return
    for seed in SEEDS:
        for name, (optimizer, accumulation) in variants().items():
            if str(seed) not in result.get(name, {}):
                result.setdefault(name, {})[str(seed)] = measure(optimizer, accumulation, seed)
                RESULT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
