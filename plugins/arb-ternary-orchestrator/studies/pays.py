"""Whether orchestrated training pays: damaged data, a rate four times too large, and nothing wrong;
three seeds each.

    python plugins/arb-ternary-orchestrator/studies/pays.py --out
    plugins/arb-ternary-orchestrator/results/pays.json

An orchestrated run takes ``--steps`` steps and, for strategies that it tries and does not keep,
some more. The plain run beside it takes as many as both together, and so does the undisturbed one
that both are compared with. Rates are the best of a few by the loss on the last tenth of the
training stream, with a seed of their own; validation text is read once, at the end of each run. A
run that is in the file already is not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

import matplotlib.pyplot as plt

from arb_ternary_bench.compare import machine_facts
from arb_ternary_train.metrics import read_metrics

SPOILED: Final = Path(__file__).with_name("spoiled.py")
SEEDS: Final = (0, 1, 2)
#: The seed of the runs that choose a rate.
TUNING_SEED: Final = 100
RATES: Final = {"votes": (0.1, 0.2, 0.4), "adamw": (0.004, 0.008, 0.016, 0.032)}
#: Shares of the steps: where the damaged stretch begins, and how long it is.
SPOILED_FROM = 0.7
SPOILED_FOR = 0.06
TOO_LARGE: Final = 4.0
CONDITIONS: Final = ("damaged", "fast", "nothing")
MODEL: Final = {
    "name": "decoder",
    "width": 64,
    "layers": 2,
    "heads": 4,
    "feed_forward": 128,
    "activation": "swiglu",
    "query_key_norm": True,
    "max_length": 64,
}
#: What the demo's config says of ternary weights, and all parts of a decoder in float.
TERNARY: Final = {
    "group_size": "row",
    "scale_rule": "frozen",
    "embedding_scale_rule": "frozen",
    "logit_scale": 1,
}
FLOAT: Final = {"float_parts": ["linears", "embedding", "head", "norms"]}


def config_of(rule: str, rate: float, steps: int, seed: int) -> dict[str, Any]:
    """The config of a plain run on sound data."""
    votes = rule == "votes"
    return {
        "name": "pays",
        "seed": seed,
        "threads": 1,
        "backend": "cpu",
        "plugins": [str(SPOILED)],
        "data": {"name": "shakespeare", "tokenizer": "bytes"},
        "model": {**MODEL, **(TERNARY if votes else FLOAT)},
        "masking": {"name": "spoiled"},
        "optimizer": {"name": "scaled_votes" if votes else "adamw", "lr": rate},
        "phases": [
            {
                "name": "standard",
                "steps": steps,
                "batch_size": 8,
                "block_size": 64,
                "lr_schedule": "linear",
                "warmup_steps": steps // 20,
                "eval_every": steps,
                "log_every": steps,
            }
        ],
        "checkpoint": {"every": 0},
    }


def trained(config: Mapping[str, Any]) -> dict[str, Any]:
    """Train: the report, the training losses by step, and the decisions."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.json"
        run = Path(folder) / "run"
        file.with_suffix(".yaml").write_text(json.dumps(config), encoding="utf-8")
        command = [
            sys.executable,
            "-m",
            "arb_ternary.cli.main",
            "train",
            str(file.with_suffix(".yaml")),
            "--json",
        ]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [*command, "--run-dir", str(run)],
            check=False,
            capture_output=True,
            text=True,
            env=environment,
        )
        records = read_metrics(run / "metrics.jsonl")
        losses = [record["loss"] for record in records if record["event"] == "train"]
        decisions = [record for record in records if record["event"] == "decision"]
        if done.returncode:
            if "no finite" not in done.stderr:
                sys.exit(done.stderr)
            return {"loss": None, "losses": losses, "decisions": decisions}
        report = json.loads(done.stdout)
        return {"loss": report["validation_loss"], "losses": losses, "decisions": decisions}


def tuned(rule: str, steps: int) -> dict[str, Any]:
    """The rate with the lowest mean loss over the last tenth of the training stream."""
    ends = {}
    for rate in RATES[rule]:
        losses = trained(config_of(rule, rate, steps, TUNING_SEED))["losses"]
        ends[rate] = statistics.fmean(losses[-len(losses) // 10 :])
    return {
        "rate": min(ends, key=lambda rate: ends[rate]),
        "training_losses": {str(k): v for k, v in ends.items()},
    }


def disturbed(config: dict[str, Any], condition: str, steps: int) -> dict[str, Any]:
    """``config`` with what goes wrong; the damaged stretch is the same for every number of steps of
    a run.
    """
    if condition == "fast":
        config["optimizer"]["lr"] *= TOO_LARGE
    if condition == "damaged":
        config["masking"] |= {"first": int(SPOILED_FROM * steps), "steps": int(SPOILED_FOR * steps)}
    return config


def with_policy(config: dict[str, Any], steps: int) -> dict[str, Any]:
    """``config`` orchestrated, with intervals that fit so short a run; all else as it is by
    default.
    """
    config["phases"][0]["policy"] = {
        "name": "orchestrator",
        "decision_interval": steps // 10,
        "eval_horizon": steps // 80,
        "hysteresis": steps // 20,
        "snapshot_every": steps // 80,
        "window": steps // 5,
        "max_overhead": 0.06,
    }
    return config


@cache
def undisturbed(rule: str, rate: float, steps: int, seed: int) -> dict[str, Any]:
    """A plain run on sound data; several orchestrated ones may have lost as many steps."""
    return trained(config_of(rule, rate, steps, seed))


def compared(rule: str, condition: str, seed: int, rate: float, steps: int) -> dict[str, Any]:
    """One seed: with the orchestrator, without, and undisturbed without."""
    ours = trained(
        with_policy(disturbed(config_of(rule, rate, steps, seed), condition, steps), steps)
    )
    spent = sum(decision.get("steps_spent", 0) for decision in ours["decisions"])
    sound = undisturbed(rule, rate, steps + spent, seed)
    plain = sound
    if condition != "nothing":
        plain = trained(disturbed(config_of(rule, rate, steps + spent, seed), condition, steps))
    return {
        "orchestrated": ours["loss"],
        "plain": plain["loss"],
        "undisturbed": sound["loss"],
        "steps_spent": spent,
        "decisions": [summary(decision) for decision in ours["decisions"]],
        "losses": {"orchestrated": thinned(ours["losses"]), "plain": thinned(plain["losses"])},
    }


def summary(decision: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept of a decision."""
    kept = {key: decision[key] for key in ("step", "from", "to", "reason", "rolled_back_to")}
    rewards = {each["name"]: each["reward"] for each in decision["candidates"]}
    return {**kept, **({"rewards": rewards} if rewards else {})}


def thinned(losses: list[float]) -> list[float]:
    """Means of ten steps each."""
    return [round(statistics.fmean(losses[i : i + 10]), 4) for i in range(0, len(losses), 10)]


#: How tables and figures speak of what goes wrong.
TITLES: Final = {
    "damaged": f"{SPOILED_FOR:.0%} of the steps on noise",
    "fast": f"rate x {TOO_LARGE:g}",
    "nothing": "nothing wrong",
}


def table(result: Mapping[str, Any]) -> str:
    """Validation losses of all runs, means and standard deviations, as Markdown."""
    lines = [
        "| | what goes wrong | undisturbed | plain | orchestrated | plain behind | orchestrated "
        "behind | steps lost | rollbacks | switches |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for rule, conditions in result["runs"].items():
        for condition, runs in conditions.items():
            found = list(runs.values())
            cells = [
                shown([run[name] for run in found])
                for name in ("undisturbed", "plain", "orchestrated")
            ]
            for name in ("plain", "orchestrated"):
                failed = any(run[name] is None for run in found)
                apart = [] if failed else [run[name] - run["undisturbed"] for run in found]
                cells.append("diverged" if failed else f"{statistics.fmean(apart):+.3f}")
            lost = statistics.fmean(run["steps_spent"] for run in found)
            cells.append(f"{lost:.0f} ({lost / (lost + result['steps']):.1%})")
            back = [
                [d for d in run["decisions"] if d["rolled_back_to"] is not None] for run in found
            ]
            moved = [[d for d in run["decisions"] if d["from"] != d["to"]] for run in found]
            cells += [f"{statistics.fmean(map(len, counted)):.1f}" for counted in (back, moved)]
            lines.append(f"| {rule} | {TITLES[condition]} | {' | '.join(cells)} |")
    rates = ", ".join(f"{rule} {found['rate']:g}" for rule, found in result["rates"].items())
    seeds = len(next(iter(next(iter(result["runs"].values())).values())))
    return "\n".join(lines) + (
        f"\n\nValidation loss in nats a byte, mean and standard deviation of {seeds} seeds; "
        f"{result['steps']:,} steps of 512 bytes; the plain and the undisturbed runs take the lost "
        f"steps too. Rates: {rates}. One thread on {result['machine']['processor']}, "
        f"`{result['command']}`."
    )


def shown(losses: list[float | None]) -> str:
    """Mean and standard deviation."""
    known = [loss for loss in losses if loss is not None]
    if len(known) < len(losses):
        return f"{len(losses) - len(known)} of {len(losses)} diverged"
    spread = statistics.stdev(known) if len(known) > 1 else 0.0
    return f"{statistics.fmean(known):.3f} ± {spread:.3f}"


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Training losses of the first seed, with and without; a column for what goes wrong, a row for
    a rule.
    """
    figure, all_axes = plt.subplots(
        2, 3, figsize=(10, 5.5), sharex=True, sharey="row", layout="constrained"
    )
    for row, (rule, conditions) in zip(all_axes, result["runs"].items(), strict=True):
        for axes, (condition, runs) in zip(row, conditions.items(), strict=True):
            run = runs[str(SEEDS[0])]
            for name, colour in (("plain", "#D55E00"), ("orchestrated", "#0072B2")):
                losses = run["losses"][name]
                axes.plot(
                    [10 * i + 5 for i in range(len(losses))],
                    losses,
                    color=colour,
                    linewidth=1.2,
                    label=name,
                )
            for decision in run["decisions"]:
                if decision["from"] != decision["to"]:
                    axes.axvline(decision["step"], color="0.6", linewidth=0.8, linestyle=":")
            axes.set_title(f"{rule}: {TITLES[condition]}", fontsize=10)
            axes.set_ylim(1.8, 3.6)
            axes.grid(alpha=0.3)
        row[0].set_ylabel("training loss, nats a byte")
    for axes in all_axes[-1]:
        axes.set_xlabel("optimizer step")
    all_axes[0][0].legend(frameon=False, fontsize=9)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Run what is missing, one seed of everything before the next."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--figure", type=Path, help="where to draw the losses, when all runs are there"
    )
    parser.add_argument(
        "--steps", type=int, default=800, help="steps of an orchestrated run (default: %(default)s)"
    )
    arguments = parser.parse_args()
    out = arguments.out
    steps = arguments.steps
    command = f"python plugins/arb-ternary-orchestrator/studies/pays.py --steps {steps}"
    result: dict[str, Any] = {
        "command": command,
        "machine": machine_facts(),
        "steps": steps,
        "rates": {},
        "runs": {},
    }
    if out.exists():
        result = json.loads(out.read_text(encoding="utf-8"))
        if result["steps"] != steps:
            parser.error(
                f"{out} holds runs of {result['steps']} steps: give --steps {result['steps']}, or "
                f"another --out"
            )

    def save() -> None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result) + "\n", encoding="utf-8")

    for rule in RATES:
        if rule not in result["rates"]:
            result["rates"][rule] = tuned(rule, steps)
            print(f"{rule}: {result['rates'][rule]}", flush=True)
            save()
    for seed in SEEDS:
        for rule in RATES:
            for condition in CONDITIONS:
                runs = result["runs"].setdefault(rule, {}).setdefault(condition, {})
                if str(seed) in runs:
                    continue
                rate = result["rates"][rule]["rate"]
                runs[str(seed)] = found = compared(rule, condition, seed, rate, steps)
                shown = {
                    key: found[key]
                    for key in ("orchestrated", "plain", "undisturbed", "steps_spent")
                }
                print(f"{rule}, {condition}, seed {seed}: {shown}", flush=True)
                save()
    print(table(result))
    if arguments.figure is not None:
        draw(result, arguments.figure)


if __name__ == "__main__":
    main()
