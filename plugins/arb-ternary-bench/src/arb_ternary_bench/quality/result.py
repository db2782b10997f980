"""The result of a study as plain numbers, and as a table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Final

from arb_ternary_bench.quality.outcomes import loss_of

#: Of the table.
COLUMNS: Final = (
    "rule",
    "validation loss",
    "state bits a linear weight",
    "state bits a parameter",
    "stored gradient bytes",
    "parameters",
    "tokens/s",
    "peak MiB",
    "settings",
)

Outcomes = Sequence[Mapping[str, Any]]


def make_result(
    facts: Mapping[str, Any],
    tuning: Mapping[str, Outcomes],
    chosen: Mapping[str, int | None],
    final: Mapping[str, Outcomes],
) -> dict[str, Any]:
    """The content of ``result.json``.

    Args:
        facts: machine, size, tokens, and the ``recipes`` with their summaries.
        tuning: outcomes of the tuning runs of each recipe, by trial.
        chosen: the trial that each recipe was trained with.
        final: outcomes of the final runs of each recipe, by seed; empty where no trial could be
            chosen.
    """
    told = {key: value for key, value in facts.items() if key != "recipes"}
    entropies = next(
        (outcome for outcomes in final.values() for outcome in outcomes if "curve" in outcome), {}
    )
    return {
        **told,
        "unigram_entropy": entropies.get("unigram_entropy"),
        "bigram_entropy": entropies.get("bigram_entropy"),
        "rules": [
            {
                "name": rule,
                **facts["recipes"][rule],
                **_rule(tuning[rule], chosen[rule], final[rule]),
            }
            for rule in tuning
        ],
    }


def _rule(tuning: Outcomes, chosen: int | None, final: Outcomes) -> dict[str, Any]:
    losses = [outcome["loss"] for outcome in final]
    finite = [loss for loss in losses if loss is not None]
    complete = bool(losses) and len(finite) == len(losses)
    counted = next((outcome for outcome in final if "linears" in outcome), None)
    return {
        "tuning": [
            {
                "settings": outcome["settings"],
                "loss": outcome["loss"],
                "failure": outcome["failure"],
            }
            for outcome in tuning
        ],
        "chosen": chosen,
        # Of the final runs: a recipe may make a rate depend on the length of a run.
        "settings": None if chosen is None else (final[0] if final else tuning[chosen])["settings"],
        "validation_losses": losses,
        "failures": [outcome["failure"] for outcome in final],
        # A seed that failed is no number, and a mean without it would be that of the lucky ones.
        "validation_loss_mean": statistics.fmean(finite) if complete else None,
        "validation_loss_stdev": (statistics.stdev(finite) if len(finite) > 1 else 0.0)
        if complete
        else None,
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


def rows(result: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The table's rows, the best rule first and those without a number last."""
    order = sorted(
        result["rules"], key=lambda rule: loss_of({"loss": rule["validation_loss_mean"]})
    )
    return [_row(rule) for rule in order]


def _row(rule: Mapping[str, Any]) -> tuple[str, ...]:
    settings = "" if rule["settings"] is None else _flat(rule["settings"])
    if rule["parameters"] is None:
        return (rule["name"], "failed", "", "", "", "", "", "", settings)
    mean = rule["validation_loss_mean"]
    speeds = [speed for speed in rule["tokens_per_second"] if speed]
    seeds = len(rule["validation_losses"])
    loss = "failed" if mean is None else f"{mean:.4f}"
    if mean is not None and seeds > 1:
        loss += f" ± {rule['validation_loss_stdev']:.4f}"
    return (
        rule["name"],
        loss,
        f"{rule['state_bits_per_linear_weight']:.2f}",
        f"{rule['state_bits_per_parameter']:.2f}",
        f"{rule['stored_gradient_bytes']:,}",
        f"{rule['parameters']:,}",
        f"{statistics.median(speeds):,.0f}" if speeds else "",
        f"{max(peak for peak in rule['peak_bytes'] if peak) / 2**20:,.0f}",
        settings,
    )


def _flat(settings: Mapping[str, Any], prefix: str = "") -> str:
    """``{"optimizer": {"lr": 0.1}}`` as ``optimizer.lr 0.1``."""
    parts = []
    for key, value in settings.items():
        path = f"{prefix}{key}"
        parts.append(_flat(value, f"{path}.") if isinstance(value, Mapping) else f"{path} {value}")
    return ", ".join(parts)


def markdown(result: Mapping[str, Any]) -> str:
    """The table in Markdown, with what it was measured on below it."""
    numeric = ("---", *("---:",) * (len(COLUMNS) - 2), "---")
    lines = [COLUMNS, numeric, *rows(result)]
    seeds = result["seeds"]
    machine = result["machine"]
    entropies = ""
    if result["bigram_entropy"] is not None:
        entropies = (
            f" The validation bytes have a unigram entropy of {result['unigram_entropy']:.3f} and "
            f"a bigram entropy of {result['bigram_entropy']:.3f}."
        )
    note = (
        f"Size {result['size']}; validation loss in nats a byte, mean and standard deviation of "
        f"{len(seeds)} {'seed' if len(seeds) == 1 else 'seeds'}, {result['tokens']:,} tokens each; "
        f"the settings are the best of {len(result['rules'][0]['tuning'])} trials on "
        f"{result['tuning_tokens']:,} tokens, judged on the end of the training text.{entropies} "
        f"{result['jobs']} at once, {result['threads']} threads each, on {machine['processor']}, "
        f"{machine['cores']} cores, torch {machine['torch']}."
    )
    return "\n".join([*("| " + " | ".join(line) + " |" for line in lines), "", note, ""])
