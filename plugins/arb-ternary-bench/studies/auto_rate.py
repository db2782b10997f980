"""``lr: auto`` of scaled votes beside the best of a grid of rates, on three configs that its rule
was not made from.

    python plugins/arb-ternary-bench/studies/auto_rate.py --work DIR --out RESULT.json

Two configs more are of the studies that the rule was made from, and one is of a model that it is
refused for. Losses are those on a part of the training text that is held aside, means over the
seeds that every rate of a config has. A run whose result is in ``--work`` already is not repeated,
and every finished run is written at once.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any, Final

from arb_ternary_bench.child import ChildRun
from arb_ternary_bench.compare import machine_facts
from arb_ternary_bench.result_file import read_result, write_result
from arb_ternary_bench.texts import divide_text, help_topics, library_source

BASE: Final = Path(__file__).with_name("pure_start.yaml")
#: Bytes of a text that is made here, at most.
LONGEST: Final = 1_000_000
_SMALL: Final = {"model.width": 64, "model.layers": 2, "model.feed_forward": 128}
_SHORT: Final = {
    "phases.0.lr_schedule": "cosine",
    "phases.0.warmup_steps": 30,
    "phases.0.block_size": 64,
}
_SPLIT: Final = {
    "name": "split",
    "ternary": {"name": "scaled_votes"},
    "float": {"name": "adamw", "lr": 0.006},
}
_FLOAT_ENDS: Final = {
    "model.float_parts": ["embedding", "head"],
    "model.embedding_scale_rule": "residual",
    "model.logit_scale": 0,
    "optimizer": _SPLIT,
}
# : A text, what is changed in the base config, the option that is the rate, and rates a factor of
# 1.5 apart.
CONFIGS: Final[dict[str, tuple[str, dict[str, Any], str, tuple[float, ...]]]] = {
    "source code, pure, 600 steps of 512 tokens, cosine": (
        "library",
        {**_SMALL, **_SHORT, "phases.0.steps": 600},
        "optimizer.lr",
        (0.053, 0.08, 0.12, 0.18, 0.27),
    ),
    "help topics, float embedding and head, 150 steps of 2,048 tokens, linear": (
        "topics",
        {
            "model.width": 96,
            "model.layers": 2,
            "model.feed_forward": 192,
            **_FLOAT_ENDS,
            "phases.0.steps": 150,
            "phases.0.batch_size": 16,
            "phases.0.warmup_steps": 15,
        },
        "optimizer.ternary.lr",
        (0.08, 0.12, 0.18, 0.27, 0.4),
    ),
    "shakespeare, float embedding and head, 500 steps of 1,024 tokens, linear": (
        "shakespeare",
        {
            "model.width": 160,
            "model.heads": 5,
            "model.feed_forward": 320,
            **_FLOAT_ENDS,
            "phases.0.steps": 500,
            "phases.0.warmup_steps": 50,
        },
        "optimizer.ternary.lr",
        (0.06, 0.09, 0.135, 0.2, 0.3),
    ),
    "help topics, pure, 300 steps of 2,048 tokens, cosine": (
        "topics",
        {
            "model.width": 96,
            "model.layers": 2,
            "model.feed_forward": 192,
            "phases.0.steps": 300,
            "phases.0.batch_size": 16,
            "phases.0.warmup_steps": 15,
            "phases.0.lr_schedule": "cosine",
        },
        "optimizer.lr",
        (0.08, 0.12, 0.18, 0.27, 0.4),
    ),
    "source code, float embedding and head, 1,000 steps of 1,024 tokens, linear": (
        "library",
        {**_SMALL, **_FLOAT_ENDS},
        "optimizer.ternary.lr",
        (0.06, 0.09, 0.135, 0.2, 0.3),
    ),
    "shakespeare, bytes hidden, pure, 300 steps of 1,024 tokens, sqrt": (
        "shakespeare",
        {
            **_SMALL,
            "masking": "absorbing",
            "model.causal": False,
            "phases.0.steps": 300,
            "phases.0.warmup_steps": 15,
            "phases.0.lr_schedule": "sqrt",
        },
        "optimizer.lr",
        (0.08, 0.12, 0.18, 0.233, 0.27, 0.4),
    ),
}
#: Of which the rates took part in the rule of today; an earlier rule was measured on them.
FITTED: Final = frozenset(tuple(CONFIGS)[:2])
#: Where ``auto`` is refused: it counts every place of a sample.
REFUSED: Final = frozenset(
    name for name, (_, changes, *_) in CONFIGS.items() if "masking" in changes
)


def data_of(text: str, folder: Path) -> dict[str, Any]:
    """The section ``data`` of a config: a text to train on, and a part of it to measure on."""
    if text == "shakespeare":
        return {"name": text, "tokenizer": "bytes", "tuning": True}
    content = help_topics() if text == "topics" else library_source()
    parts = divide_text(content[:LONGEST], folder, f"{text}-")
    return {
        "name": "text",
        "tokenizer": "bytes",
        "path": str(parts["train"]),
        "validation": str(parts["choice"]),
    }


def run(work: Path, name: str, rate: float | str, seed: int) -> tuple[float, float]:
    """The rate of one run, as a number, and its loss; it is made where it is not there yet."""
    text, changes, option, _ = CONFIGS[name]
    directory = work / f"{tuple(CONFIGS).index(name)}-{text}-{rate}-{seed}"
    if not (directory / "result.json").exists():
        settings = {
            "data": data_of(text, work),
            "seed": seed,
            "threads": 1,
            "phases.0.eval_every": 1000,
            **changes,
        }
        overrides = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
        child = ChildRun.start(BASE, directory, [*overrides, f"{option}={rate}"], threads=1)
        if ended := child.wait().code:
            sys.exit(f"{directory}: the run ended with {ended}\n{child.log_tail()}")
    chosen = json.loads((directory / "run.json").read_text(encoding="utf-8")).get(
        "chosen", {option: rate}
    )
    result = json.loads((directory / "result.json").read_text(encoding="utf-8"))
    return chosen[option], result["validation_loss"]


def asked_of(name: str) -> tuple[float | str, ...]:
    """What a config is run with."""
    return CONFIGS[name][-1] if name in REFUSED else ("auto", *CONFIGS[name][-1])


def seeds_of(runs: dict[str, dict[str, Any]], name: str) -> list[int]:
    """The seeds that a config has all of its runs with."""
    found = {(each["asked"], each["seed"]) for each in runs.values() if each["config"] == name}
    return [
        seed
        for seed in sorted({seed for _, seed in found})
        if {(each, seed) for each in asked_of(name)} <= found
    ]


def table(runs: dict[str, dict[str, Any]]) -> str:
    """A line a config: the losses of the grid, and of ``auto``; means over seeds."""
    lines = [
        "| config | seeds | rates: losses | auto | behind the best |",
        "|---|---:|---|---:|---:|",
    ]
    for name, (*_, grid) in CONFIGS.items():
        seeds = seeds_of(runs, name)
        if not seeds:
            continue
        found = {
            asked: [runs[f"{name}, {asked}, seed {seed}"]["loss"] for seed in seeds]
            for asked in asked_of(name)
        }
        losses = {rate: statistics.fmean(found[rate]) for rate in grid}
        best = min(losses, key=lambda each: losses[each])
        shown = ", ".join(f"{rate}: {loss:.4f}" for rate, loss in losses.items())
        said = name + (" (fitted)" if name in FITTED else "")
        if name in REFUSED:
            lines.append(f"| {said} | {len(seeds)} | {shown} | refused | |")
            continue
        rate = runs[f"{name}, auto, seed {seeds[0]}"]["rate"]
        behind = [auto - other for auto, other in zip(found["auto"], found[best], strict=True)]
        spread = f" ± {statistics.stdev(behind):.4f}" if len(seeds) > 1 else ""
        lines.append(
            f"| {said} | {len(seeds)} | {shown} | {rate}: {statistics.fmean(found['auto']):.4f} "
            f"| {statistics.fmean(behind):+.4f}{spread} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Run what is missing, print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--out", type=Path, required=True, help="the result, JSON")
    parser.add_argument(
        "--seeds", type=int, default=3, help="of the configs beside the fit (default: %(default)s)"
    )
    arguments = parser.parse_args()
    work: Path = arguments.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    result = read_result(arguments.out, {"machine": machine_facts(), "runs": {}})
    for seed in range(arguments.seeds):
        for name in (each for each in CONFIGS if not seed or each not in FITTED | REFUSED):
            for asked in asked_of(name):
                key = f"{name}, {asked}, seed {seed}"
                if key not in result["runs"]:
                    rate, loss = run(work, name, asked, seed)
                    found = {
                        "config": name,
                        "asked": asked,
                        "rate": rate,
                        "seed": seed,
                        "loss": loss,
                    }
                    result["runs"][key] = found
                    write_result(arguments.out, result)
    print(table(result["runs"]))


if __name__ == "__main__":
    main()
