"""What the rule of ``lr: auto`` gives up against rates that were tuned in earlier studies, which it
was made from.

    python plugins/arb-ternary-bench/studies/auto_rate_basis.py

Reads result files only. The loss at the rate of the rule is that of a parabola through the three
rates around the best, over the logarithm of the rate; beyond the rates that were tried it is an
extrapolation.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from arb_ternary_bench.quality.protocol import rate_for
from arb_ternary_train.protocols import Course
from arb_ternary_train.schedules import ScheduleName, scheduled_value
from arb_ternary_votes.rate import rate_of

PLUGINS: Final = Path(__file__).parents[2]
Tuned = tuple[str, Course, dict[float, float]]


def course(steps: int, tokens: int, width: int, schedule: ScheduleName, warmup: int) -> Course:
    """A run of ``steps`` steps that ends at a twentieth of its peak."""
    options: dict[str, Any] = {"steps": steps, "warmup": warmup, "peak": 1.0, "floor": 0.05}
    rates = [scheduled_value(schedule, step, **options) for step in range(steps)]
    return Course(steps=steps, tokens=tokens, mean_rate=sum(rates) / steps, width=width)


def read(plugin: str, name: str) -> Any:
    """A result file."""
    return json.loads(
        (PLUGINS / f"arb-ternary-{plugin}" / "results" / f"{name}.json").read_text(encoding="utf-8")
    )


def trials(name: str, rule: str) -> dict[float, float]:
    """Loss by rate of votes, of the trials of a recipe that share the rate of float parts."""
    (found,) = (each for each in read("bench", f"quality-{name}")["rules"] if each["name"] == rule)
    losses: dict[float, float] = {}
    for trial in found["tuning"]:
        optimizer = trial["settings"]["optimizer"]
        losses.setdefault(optimizer.get("ternary", optimizer)["lr"], trial["loss"])
    return losses


def tuned() -> Iterator[Tuned]:
    """Every study of rates of scaled votes with training from random weights and a course that its
    file tells.
    """
    for width, losses in read("bench", "transfer")["runs"].items():
        if len(losses) > 2:
            found = {float(rate): loss for rate, loss in losses.items()}
            yield f"pure, width {width}", course(200, 2048, int(width), "sqrt", 20), found
    pays = read("orchestrator", "pays")["rates"]["votes"]["training_losses"]
    yield (
        "pure, width 64",
        course(800, 512, 64, "linear", 40),
        {float(rate): loss for rate, loss in pays.items()},
    )
    demo = read("bench", "demo-tuning")
    losses = {float(key.split()[1]): loss for key, loss in demo["plain_votes"].items()}
    yield "the demo", course(2400, 1024, 128, "linear", 100), losses
    quieter = {
        float(key.split()[2]): loss
        for key, loss in demo["logit_scale"].items()
        if key.startswith("0,")
    }
    yield "the demo, quieter logits", course(2400, 1024, 128, "linear", 100), quieter
    small = course(2560, 2048, 192, "linear", 100)
    yield "float embedding and head", small, trials("small", "scaled_votes")
    yield "pure", small, trials("small", "scaled_votes_pure")
    yield (
        "float embedding and head",
        course(256, 2048, 320, "linear", 25),
        trials("medium", "scaled_votes"),
    )
    yield (
        "4-bit accumulators",
        course(256, 4096, 192, "linear", 51),
        trials("survey", "scaled_votes_4bit"),
    )
    for width in (96, 640):
        for way, what in (("votes8", "float embedding and head"), ("pure", "pure")):
            yield (
                f"{what}, the ladder",
                course(256, 2048, width, "linear", 25),
                ladder_trials(way, width),
            )
    runs = read("bench", "auto-rate")["runs"].values()
    yield "pure, source code", course(600, 512, 64, "cosine", 30), grid(runs, "source code, pure")
    of_topics = course(150, 2048, 96, "linear", 15)
    yield "float embedding and head, help topics", of_topics, grid(runs, "help topics, float")


def ladder_trials(way: str, width: int) -> dict[float, float]:
    """Loss by rate of votes, of the ladder's trials that share the rate of float parts with two
    others or more.
    """
    found = [
        each
        for name, each in read("bench", "ladder")["trials"].items()
        if name.startswith(f"trial-{way}-{width}-")
    ]
    ((shared, _),) = Counter(each["floats"] for each in found).most_common(1)
    return {
        rate_for(256, each["votes"]): each["loss"] for each in found if each["floats"] == shared
    }


def grid(runs: Iterable[dict[str, Any]], config: str) -> dict[float, float]:
    """Loss by rate, of the runs of a config with a rate that is a number."""
    found = (each for each in runs if each["config"].startswith(config) and each["asked"] != "auto")
    return {each["asked"]: each["loss"] for each in found}


def behind(losses: dict[float, float], rate: float) -> float:
    """Loss at ``rate``, by a parabola, less the least of ``losses``."""
    rates = sorted(losses)
    best = min(max(rates.index(min(losses, key=lambda each: losses[each])), 1), len(rates) - 2)
    near = rates[best - 1 : best + 2]
    parabola = np.polyfit(np.log(near), [losses[each] for each in near], 2)
    return float(np.polyval(parabola, math.log(rate)) - min(losses.values()))


def main() -> None:
    """Print a line a study."""
    print("| model | width | steps | tokens a step | rates tried | best of them | auto | behind |")
    print("|---|---:|---:|---:|---|---:|---:|---:|")
    for name, given, losses in tuned():
        rate = rate_of(given)
        best = min(losses, key=lambda each: losses[each])
        tried = ", ".join(f"{each:g}" for each in sorted(losses))
        print(
            f"| {name} | {given.width} | {given.steps:,} | {given.tokens:,} | {tried} | {best:g} | "
            f"{rate:g} | {behind(losses, rate):+.4f} |"
        )


if __name__ == "__main__":
    main()
