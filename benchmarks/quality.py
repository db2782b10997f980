"""Compare what update rules learn from the same tokens, tuned alike, and with how much state.

Every rule is tried with four settings (``_quality/recipes.yaml``). The setting with the least loss
on the end of the training text is then trained with several seeds, and measured on the validation
text. See reports/quality.md.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from attrs import frozen

from _quality.recipes import TRIALS, Recipe, load_recipes
from _quality.runs import AUDITED, Outcome, PlannedRun, choose, train
from _quality.trials import SIZES, STEP_TOKENS, plan
from arb_ternary.config.options import option, optional, positive
from arb_ternary.errors import UsageProblem
from harness.machine import machine_facts
from harness.parallel import in_parallel
from harness.script import main, say
from harness.study import Study
from harness.table import Column, Record, ResultTable, mean_and_deviation, mebibytes, number


@frozen(kw_only=True)
class QualityOptions:
    """Options of the script."""

    rules: tuple[str, ...] = option((), "recipes to measure; all of them if empty")
    size: Literal["small", "medium", "tiny"] = option("small", "size of the model")
    seeds: int = option(3, "train with seeds 0 to N - 1", validator=positive)
    tokens: int | None = option(
        None, "tokens of a final run; null = the size's", validator=optional(positive)
    )
    tuning_tokens: int | None = option(
        None, "tokens of a tuning run; null = the size's", validator=optional(positive)
    )
    jobs: int = option(1, "runs at once; they share the cores", validator=positive)
    recipes: str | None = option(None, "a YAML file with further recipes")


def run(options: QualityOptions, folder: Path) -> dict[str, Any]:
    """Train what is not trained yet, and return the content of the result file.

    Raises:
        UsageProblem: there are fewer tokens than one step takes, or there is no such recipe.
        ArbError: a run could not be carried out.
    """
    size = SIZES[options.size]
    tokens = _whole_steps("tokens", options.tokens or size.tokens)
    tuning_tokens = _whole_steps("tuning_tokens", options.tuning_tokens or size.tuning_tokens)
    further = None if options.recipes is None else Path(options.recipes)
    recipes = load_recipes(options.rules, further)
    threads = max(1, (os.cpu_count() or 1) // options.jobs)

    # Every config is checked before anything runs.
    tuning = []
    for trial in range(TRIALS):
        for recipe in recipes:
            tuning.append(plan("tuning", size, recipe, trial, trial, tuning_tokens))
            plan("final", size, recipe, trial, 0, tokens)

    def train_all(runs: Sequence[PlannedRun]) -> dict[str, list[Outcome]]:
        by_rule: dict[str, list[Outcome]] = {recipe.name: [] for recipe in recipes}
        for outcome in in_parallel(
            partial(train, folder=folder, threads=threads), runs, options.jobs
        ):
            by_rule[outcome["rule"]].append(outcome)
        return by_rule

    tuned = train_all(tuning)
    trials = {}
    for recipe in recipes:
        trials[recipe.name] = choose([outcome["loss"] for outcome in tuned[recipe.name]])
        say(f"{recipe.name}: trial {trials[recipe.name]} chosen")
    final = []
    for seed in range(options.seeds):
        for recipe in recipes:
            choice = trials[recipe.name]
            if choice is not None:
                final.append(plan("final", size, recipe, choice, seed, tokens))
    finals = train_all(final)

    finished = [
        outcome for outcomes in finals.values() for outcome in outcomes if "curve" in outcome
    ]
    return {
        "machine": machine_facts(),
        "size": options.size,
        "tokens": tokens,
        "tuning_tokens": tuning_tokens,
        "seeds": list(range(options.seeds)),
        "jobs": options.jobs,
        "threads": threads,
        "unigram_entropy": finished[0]["unigram_entropy"] if finished else None,
        "bigram_entropy": finished[0]["bigram_entropy"] if finished else None,
        "rules": [
            rule_record(recipe, tuned[recipe.name], trials[recipe.name], finals[recipe.name])
            for recipe in recipes
        ],
    }


def _whole_steps(key: str, tokens: int) -> int:
    if tokens < STEP_TOKENS:
        raise UsageProblem(f"{key}: an optimizer step alone takes {STEP_TOKENS} tokens")
    return tokens // STEP_TOKENS * STEP_TOKENS


def rule_record(
    recipe: Recipe, tuning: Sequence[Outcome], chosen: int | None, final: Sequence[Outcome]
) -> dict[str, Any]:
    """Return the record of a rule; ``final`` is empty if no trial could be chosen."""
    losses = [outcome["loss"] for outcome in final]
    # A seed that failed is not a number, and a mean without it would be that of the lucky ones.
    complete = bool(losses) and None not in losses
    deviation = None
    if complete:
        deviation = statistics.stdev(losses) if len(losses) > 1 else 0.0
    counted = next((outcome for outcome in final if AUDITED[0] in outcome), {})
    return {
        "name": recipe.name,
        "summary": recipe.summary,
        "tuning": [
            {key: outcome[key] for key in ("settings", "loss", "failure")} for outcome in tuning
        ],
        "chosen": chosen,
        # A recipe may make a rate depend on the length of a run: these are those of the final runs.
        "settings": final[0]["settings"] if final else None,
        "validation_losses": losses,
        "failures": [outcome["failure"] for outcome in final],
        "validation_loss_mean": statistics.fmean(losses) if complete else None,
        "validation_loss_stdev": deviation,
        **{key: counted.get(key) for key in AUDITED},
        "tokens_per_second": [outcome.get("tokens_per_second") for outcome in final],
        "peak_bytes": [outcome.get("peak_bytes") for outcome in final],
        "curves": [outcome.get("curve", []) for outcome in final],
        "configs": [outcome["config"] for outcome in final],
    }


def _records(result: Record) -> list[Record]:
    """Return the rules, the best first and those without a number last."""
    return sorted(result["rules"], key=lambda rule: rule["validation_loss_mean"] or float("inf"))


def _loss(rule: Record) -> str:
    if rule["validation_loss_mean"] is None:
        return "failed"
    return mean_and_deviation(rule["validation_losses"], 4)


def _speed(rule: Record) -> str:
    speeds = [speed for speed in rule["tokens_per_second"] if speed]
    return number(statistics.median(speeds)) if speeds else ""


def _peak(rule: Record) -> str:
    return mebibytes(max((peak for peak in rule["peak_bytes"] if peak), default=None))


def _flat(settings: Mapping[str, Any] | None, prefix: str = "") -> str:
    """Return ``{"optimizer": {"lr": 0.1}}`` as ``optimizer.lr 0.1``."""
    parts = []
    for key, value in (settings or {}).items():
        path = f"{prefix}{key}"
        parts.append(_flat(value, f"{path}.") if isinstance(value, Mapping) else f"{path} {value}")
    return ", ".join(parts)


def notes(result: Record) -> list[str]:
    """Return what a reader of the table has to know."""
    seeds = len(result["seeds"])
    machine = result["machine"]
    entropies = ""
    if result["bigram_entropy"] is not None:
        entropies = (
            f" The validation bytes have a unigram entropy of {result['unigram_entropy']:.3f} and "
            f"a bigram entropy of {result['bigram_entropy']:.3f}."
        )
    return [
        f"Size {result['size']}; validation loss in nats per byte, mean and standard deviation of "
        f"{seeds} {'seed' if seeds == 1 else 'seeds'}, {result['tokens']:,} tokens each; the "
        f"settings are the best of {len(result['rules'][0]['tuning'])} trials on "
        f"{result['tuning_tokens']:,} tokens, judged on the end of the training text.{entropies} "
        f"{result['jobs']} at once, {result['threads']} threads each, on {machine['processor']}, "
        f"{machine['cores']} cores, torch {machine['torch']}."
    ]


TABLE = ResultTable(
    columns=(
        Column("rule", lambda rule: rule["name"], left=True),
        Column("validation loss", _loss),
        Column(
            "state bits per linear weight",
            # Only results up to commit c11d40e5 have it, and the bytes of gradients.
            lambda rule: number(rule.get("state_bits_per_linear_weight"), 2),
        ),
        Column(
            "state bits per parameter", lambda rule: number(rule["state_bits_per_parameter"], 2)
        ),
        Column("stored gradient bytes", lambda rule: number(rule.get("stored_gradient_bytes"))),
        Column("parameters", lambda rule: number(rule["parameters"])),
        Column("tokens/s", _speed),
        Column("peak MiB", _peak),
        Column("settings", lambda rule: _flat(rule["settings"]), left=True),
    ),
    records=_records,
    notes=notes,
)

STUDY = Study(name="quality", options=QualityOptions, run=run, table=TABLE)

if __name__ == "__main__":
    main(STUDY.command())
