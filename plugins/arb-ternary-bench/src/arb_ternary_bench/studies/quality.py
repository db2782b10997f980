"""Loss of each update rule after the same tokens, tuned alike, and the size of its state.

Every recipe has four trials on the end of the training text; the best one is trained with every
seed, and only these final runs read the validation text.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

from attrs import frozen

from arb_ternary.config.options import option, optional, positive
from arb_ternary.errors import UsageProblem
from arb_ternary_bench.figure import COLOURS, dress, new_figure, save
from arb_ternary_bench.machine import machine_facts
from arb_ternary_bench.quality.recipes import TRIALS, Recipe, chosen_recipes, load_recipes
from arb_ternary_bench.quality.trials import SIZES, STEP_TOKENS, final_runs, tuning_runs
from arb_ternary_bench.runs import Outcome, choose, loss_of, study_folder
from arb_ternary_bench.study import Session, Study
from arb_ternary_bench.table import Column, Record, ResultTable, mebibytes, number

#: Dashes of lines whose colour another line has.
_DASHES: Final = ("-", "--", ":", "-.")


@frozen(kw_only=True)
class QualityOptions:
    """Options of the study."""

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


def run(options: QualityOptions, session: Session) -> dict[str, Any]:
    """Carry out the study, or what is left of it.

    Raises:
        UsageProblem: a study with other settings is in the folder, or another process works there,
            or there are fewer tokens than one step takes, or there is no such recipe.
        Interrupted: SIGINT or SIGTERM came; the runs under way have saved a checkpoint.
        ArbError: a run could not be carried out.
    """
    size = SIZES[options.size]
    tokens = _whole_steps("tokens", options.tokens or size.tokens)
    tuning_tokens = _whole_steps("tuning_tokens", options.tuning_tokens or size.tuning_tokens)
    further = None if options.recipes is None else Path(options.recipes)
    recipes = chosen_recipes(options.rules, load_recipes(further))
    threads = max(1, (os.cpu_count() or 1) // options.jobs)

    # Every config is checked before anything runs.
    tuning = tuning_runs(size, recipes, tuning_tokens)
    for trial in range(TRIALS):
        final_runs(size, [(recipe, trial) for recipe in recipes], 1, tokens)

    identity = {"size": size.name, "tokens": tokens, "tuning_tokens": tuning_tokens}
    folder = session.folder
    with study_folder(
        folder, identity, jobs=options.jobs, threads=threads, say=session.say
    ) as pool:
        tuned = _by_rule(pool.train(tuning))
        chosen: list[tuple[Recipe, int]] = []
        for recipe in recipes:
            best = choose([loss_of(outcome) for outcome in tuned[recipe.name]])
            if best is None:
                session.say(f"{recipe.name}: no trial has a finite loss")
                continue
            session.say(f"{recipe.name}: trial {best} chosen")
            chosen.append((recipe, best))
        finals = _by_rule(pool.train(final_runs(size, chosen, options.seeds, tokens)))

    trials = {recipe.name: trial for recipe, trial in chosen}
    measured = [outcomes[0] for outcomes in finals.values() if "curve" in outcomes[0]]
    return {
        "machine": machine_facts(),
        **identity,
        "seeds": list(range(options.seeds)),
        "jobs": options.jobs,
        "threads": threads,
        "unigram_entropy": measured[0]["unigram_entropy"] if measured else None,
        "bigram_entropy": measured[0]["bigram_entropy"] if measured else None,
        "rules": [
            rule_record(
                recipe, tuned[recipe.name], trials.get(recipe.name), finals.get(recipe.name, [])
            )
            for recipe in recipes
        ],
    }


def _whole_steps(key: str, tokens: int) -> int:
    if tokens < STEP_TOKENS:
        raise UsageProblem(f"{key}: an optimizer step alone takes {STEP_TOKENS} tokens")
    return tokens // STEP_TOKENS * STEP_TOKENS


def _by_rule(outcomes: Mapping[str, Outcome]) -> dict[str, list[Outcome]]:
    """Return the outcomes of each rule, by trial or seed."""
    found: dict[str, list[Outcome]] = {}
    for outcome in sorted(outcomes.values(), key=lambda each: int(each["number"])):
        found.setdefault(outcome["rule"], []).append(outcome)
    return found


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
    settings = None
    if chosen is not None:
        # The settings of the final runs: a recipe may make a rate depend on the length of a run.
        settings = (final[0] if final else tuning[chosen])["settings"]
    counted = next((outcome for outcome in final if "linears" in outcome), None)
    return {
        "name": recipe.name,
        "summary": recipe.summary,
        "tuning": [
            {key: outcome[key] for key in ("settings", "loss", "failure")} for outcome in tuning
        ],
        "chosen": chosen,
        "settings": settings,
        "validation_losses": losses,
        "failures": [outcome["failure"] for outcome in final],
        "validation_loss_mean": statistics.fmean(losses) if complete else None,
        "validation_loss_stdev": deviation,
        "parameters": counted and counted["parameters"],
        "float_parameters": counted and counted["float_parameters"],
        "state_bytes": counted and counted["state_bytes"],
        "state_bits_per_parameter": counted and counted["state_bits_per_parameter"],
        "linear_weights": counted and counted["linears"]["weights"],
        "state_bits_per_linear_weight": counted and counted["linears"]["state_bits_per_weight"],
        "stored_gradient_bytes": counted and counted["linears"]["gradient_bytes"],
        "tokens_per_second": [outcome.get("tokens_per_second") for outcome in final],
        "peak_bytes": [outcome.get("peak_bytes") for outcome in final],
        "curves": [outcome.get("curve", []) for outcome in final],
        "configs": [outcome["config"] for outcome in final],
    }


# --- the table


def _records(result: Record) -> list[Record]:
    """Return the rules, the best first and those without a number last."""
    return sorted(result["rules"], key=lambda rule: loss_of({"loss": rule["validation_loss_mean"]}))


def _loss(rule: Record) -> str:
    mean = rule["validation_loss_mean"]
    if mean is None:
        return "failed"
    if len(rule["validation_losses"]) == 1:
        return f"{mean:.4f}"
    return f"{mean:.4f} ± {rule['validation_loss_stdev']:.4f}"


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
            lambda rule: number(rule["state_bits_per_linear_weight"], 2),
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


# --- the figures


def draw_losses(result: Record, destination: Path) -> None:
    """Draw validation loss over tokens: one line per rule, the mean over seeds.

    Raises:
        ArbError: the file cannot be written.
    """
    figure = new_figure(9.5, 5.0)
    axes = figure.add_subplot()
    dress(axes)
    curves = {rule["name"]: _mean_curve(rule) for rule in result["rules"]}
    lines = {name: curve for name, curve in curves.items() if curve}
    styles = _styles(result)
    for name, line in sorted(lines.items(), key=lambda item: -item[1][-1][1]):
        colour, dash = styles[name]
        losses = [loss for _, loss in line]
        axes.plot(
            [tokens / 1e6 for tokens, _ in line],
            losses,
            color=colour,
            linestyle=dash,
            linewidth=1.6,
            label=f"{losses[-1]:.3f}  {name}",
        )
    if lines:
        _show_the_end(axes, list(lines.values()))
    axes.set_xlabel("tokens, millions")
    axes.set_ylabel("validation loss, nats per byte")
    axes.set_title(_title(result), fontsize=11)
    save(figure, destination)


def _show_the_end(axes: Any, lines: Sequence[Sequence[tuple[int, float]]]) -> None:
    """Leave out the first points of curves, which are far above what the eye should compare."""
    finals = [line[-1][1] for line in lines]
    early = []
    for line in lines:
        place = max(1, len(line) // 8)
        early.append(line[max(0, min(len(line) - 2, place))][1])
    low = min(finals)
    high = max(*early, *finals)
    span = high - low or 0.1
    axes.set_ylim(low - 0.06 * span, high + 0.04 * span)
    axes.legend(
        frameon=False,
        fontsize=9,
        title="loss at the end",
        alignment="left",
        title_fontsize=9,
        loc="center left",
        bbox_to_anchor=(1.01, 0.5),
    )


def draw_frontier(result: Record, destination: Path) -> None:
    """Draw final loss over state bits per linear weight, with standard deviations over seeds.

    Raises:
        ArbError: the file cannot be written.
    """
    figure = new_figure(8.0, 5.0)
    axes = figure.add_subplot()
    dress(axes)
    styles = _styles(result)
    points = [rule for rule in result["rules"] if rule["validation_loss_mean"] is not None]
    for rule in points:
        axes.errorbar(
            [rule["state_bits_per_linear_weight"]],
            [rule["validation_loss_mean"]],
            yerr=[rule["validation_loss_stdev"]],
            color=styles[rule["name"]][0],
            marker="o",
            markersize=6,
            capsize=3,
            linewidth=1.2,
        )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    if points:
        bits = [rule["state_bits_per_linear_weight"] for rule in points]
        axes.set_xlim(min(1.5, min(bits) / 1.5), max(128, max(bits) * 2))
        _label(axes, points, styles)
    axes.set_xlabel("persistent training state, bits per linear weight")
    axes.set_ylabel("validation loss, nats per byte")
    axes.set_title(_title(result), fontsize=11)
    save(figure, destination)


def _title(result: Record) -> str:
    seeds = len(result["seeds"])
    plural = "s" if seeds > 1 else ""
    return (
        f"size {result['size']}, {result['tokens'] / 1e6:.3g} million tokens, {seeds} seed{plural}"
    )


def _styles(result: Record) -> dict[str, tuple[str, str]]:
    """Return colour and dash of each rule, the same in both figures."""
    styles = {}
    for index, rule in enumerate(result["rules"]):
        second, first = divmod(index, len(COLOURS))
        styles[rule["name"]] = (COLOURS[first], _DASHES[second % len(_DASHES)])
    return styles


def _mean_curve(rule: Record) -> list[tuple[int, float]]:
    """Return the mean over seeds at every number of tokens for which all have a loss."""
    curves = [dict(map(tuple, curve)) for curve in rule["curves"]]
    if not curves:
        return []
    shared = set.intersection(*map(set, curves))
    return [
        (tokens, statistics.fmean(curve[tokens] for curve in curves)) for tokens in sorted(shared)
    ]


def _label(axes: Any, points: list[Any], styles: Mapping[str, tuple[str, str]]) -> None:
    """Write a name next to each point, moved up where names would overlap."""
    low, high = axes.get_ylim()
    margin = 0.05 * (high - low)
    axes.set_ylim(low - margin, high + margin)
    gap = 1.1 * margin
    taken: list[tuple[float, float]] = []
    for rule in sorted(points, key=lambda each: each["validation_loss_mean"]):
        bits = rule["state_bits_per_linear_weight"]
        loss = rule["validation_loss_mean"]
        height = loss
        while any(abs(height - other) < gap and 1 / 4 < bits / at < 4 for at, other in taken):
            height += gap / 4
        taken.append((bits, height))
        arrow = None
        if height != loss:
            arrow = {"arrowstyle": "-", "color": "0.7", "linewidth": 0.6}
        axes.annotate(
            rule["name"],
            (bits, loss),
            xytext=(bits * 1.06, height),
            textcoords="data",
            va="center",
            fontsize=8,
            color=styles[rule["name"]][0],
            arrowprops=arrow,
        )


STUDY = Study(
    options=QualityOptions,
    run=run,
    table=TABLE,
    figures={"loss.png": draw_losses, "frontier.png": draw_frontier},
)
