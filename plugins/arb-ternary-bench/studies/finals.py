"""Final runs of recipes of ``arb bench quality`` whose settings are known: no trials, as many seeds
as are asked for.

    python plugins/arb-ternary-bench/studies/finals.py --work DIR --out RESULT.json --trials
    bitnet_gains=2,...

The model, text and tokens of the bench; a recipe is followed by the number of its trial, counted
from 0. ``--float32`` multiplies in float32 instead of bfloat16, which a processor without
instructions for it does much faster. The same command continues one that was stopped, and rules
that ``--out`` has of other commands stay in it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from arb_ternary.errors import UsageProblem
from arb_ternary.plugins.manager import manager
from arb_ternary_bench.compare import machine_facts
from arb_ternary_bench.quality.pool import Pool
from arb_ternary_bench.quality.result import make_result, rows
from arb_ternary_bench.quality.sizes import SIZES
from arb_ternary_bench.quality.trials import Trial, final_trials
from arb_ternary_bench.result_file import read_result, write_result
from arb_ternary_train.directory import locked
from arb_ternary_train.signals import StopRequest


def in_float32(trial: Trial) -> Trial:
    """The trial with its matrices multiplied in float32."""
    (phase,) = trial.config["phases"]
    return attrs.evolve(trial, config={**trial.config, "phases": [{**phase, "use_amp": False}]})


def tell(trial: Trial, outcome: Mapping[str, Any]) -> None:
    """Say what a run gave."""
    print(f"{trial.title}: {outcome['loss'] or outcome['failure']}", flush=True)


def merge(before: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """``new``, and the rules of ``before`` that it has not."""
    for fact in ("size", "tokens", "float32"):
        if before[fact] != new[fact]:
            sys.exit(
                f"--out holds runs with {fact} {before[fact]}, and these have {new[fact]}; give "
                f"another"
            )
    names = {rule["name"] for rule in new["rules"]}
    return {
        **new,
        "rules": [*(rule for rule in before["rules"] if rule["name"] not in names), *new["rules"]],
    }


def main() -> None:
    """Run what is missing, write the result, print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--out", type=Path, required=True, help="the result, JSON")
    parser.add_argument(
        "--trials", required=True, help="RULE=TRIAL,... of each recipe, the setting that it has"
    )
    parser.add_argument("--size", choices=SIZES, default="small", help="(default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument(
        "--jobs", type=int, default=2, help="runs at once, a thread each (default: %(default)s)"
    )
    parser.add_argument("--float32", action="store_true", help="multiply in float32")
    arguments = parser.parse_args()
    chosen = {
        rule: int(number)
        for rule, number in (each.split("=") for each in arguments.trials.split(","))
    }
    size = SIZES[arguments.size]
    trials = final_trials(size, chosen, range(arguments.seeds), size.tokens)
    if arguments.float32:
        trials = [in_float32(trial) for trial in trials]
    work: Path = arguments.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    with (
        locked(work, UsageProblem(f"{work}: another study is at work here")),
        StopRequest() as stop,
    ):
        pool = Pool(
            folder=work, jobs=arguments.jobs, threads=1, stop=stop, say=print, finished=tell
        )
        outcomes = pool.run(trials)
    found = {rule: manager().registry.get("recipe", rule) for rule in chosen}
    facts = {
        "machine": machine_facts(),
        "size": size.name,
        "tokens": size.tokens,
        "float32": arguments.float32,
        "seeds": list(range(arguments.seeds)),
        "jobs": arguments.jobs,
        "threads": 1,
        "recipes": {
            rule: {"summary": each.spec.summary, "distribution": each.distribution}
            for rule, each in found.items()
        },
    }
    finals = {
        rule: [outcomes[trial.name] for trial in trials if trial.rule == rule] for rule in chosen
    }
    new = make_result(facts, {rule: [] for rule in chosen}, dict(chosen), finals)
    result = merge(read_result(arguments.out, new), new)
    write_result(arguments.out, result)
    print("\n".join(" | ".join(row) for row in rows(result)))


if __name__ == "__main__":
    main()
