"""Figures of what the studies of votes found: starts, shapes, ends of runs, orthogonalised
gradients, rates by a rule.

    python plugins/arb-ternary-bench/studies/learning_figures.py docs/images

Reads ``pure-start.json``, ``run-end.json``, ``quality-small.json``, ``quality-orthogonal.json``,
``ladder.json`` and ``auto-rate.json`` among the results and writes ``pure-start.png``,
``shapes.png``, ``run-end.png``, ``orthogonal.png`` and ``auto-rate.png`` into the folder.
"""

from __future__ import annotations

import json
import statistics
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
from auto_rate import CONFIGS, FITTED, REFUSED, seeds_of
from ladder_figures import finish, points

mpl.use("Agg")
import matplotlib.pyplot as plt

RESULTS: Final = Path(__file__).parents[1] / "results"
#: Okabe and Ito, 2008.
RED: Final = "#D55E00"
GREEN: Final = "#009E73"
ORANGE: Final = "#E69F00"
BLUE: Final = "#0072B2"
PINK: Final = "#CC79A7"
TEXTS: Final = {
    "shakespeare": "the built-in text",
    "topics": "help topics",
    "library": "source code",
}
STARTS: Final = {
    "pure": ("ternary,\nlogits x 2", PINK),
    "logits_1": ("ternary,\nlogits x 1", RED),
    "trit_vectors": ("vectors\nof trits", GREEN),
    "vectors": ("vectors\nfloat", ORANGE),
    "float_embedding_and_head": ("float", BLUE),
}
SHAPES: Final = {
    "rest": "ternary, width 128, 3 layers",
    "rest_160x2": "160, 2 layers",
    "rest_112x4": "112, 4 layers",
    "rest_tied": "head tied",
    "rest_sparse": "half as many trits",
    "rest_logits_2": "logits x 2",
    "rest_float": "float32",
}
#: Variants by size, drawn over tokens as what they are behind quantisation-aware training.
ENDS: Final = {
    "search": (
        "8 bits, 0.4 M weights, one seed",
        "qat_0.006",
        {
            "votes_0.15": ("the line", RED),
            "growing": ("a batch that grows", BLUE),
            "tail_below_0.8": ("votes of the tail late", GREEN),
        },
    ),
    "small": (
        "4 bits, 1.1 M weights, three seeds",
        "qat_0.0056_decay_0.01",
        {
            "4_bits_rate_0.19": ("32 sequences a step", RED),
            "4_bits_doublings_rate_0.19": ("doubled three times", BLUE),
            "4_bits_1_doublings_0.135_0.0054": ("doubled once, lower rates", GREEN),
            "4_bits_spectral_clip_doubled_0.135_0.0054": ("and gradients clipped", PINK),
        },
    ),
}
#: Rules of long runs, drawn as what they are behind scaled votes; and ways of the ladder.
RULES: Final = {
    "scaled_votes_orthogonal": ("orthogonalised gradients", RED),
    "bitnet": ("QAT, AdamW", GREEN),
    "float32": ("float32, AdamW", BLUE),
}
WAYS: Final = {
    "orthogonal": ("orthogonalised gradients", RED),
    "votes8": ("scaled votes", PINK),
    "qat": ("QAT, AdamW", GREEN),
}


def runs_of(name: str) -> dict[str, dict[str, Any]]:
    """The runs of a result file."""
    found: dict[str, dict[str, Any]] = json.loads(
        (RESULTS / f"{name}.json").read_text(encoding="utf-8")
    )["runs"]
    return found


def chosen(runs: Iterable[Mapping[str, Any]], **wanted: object) -> list[Mapping[str, Any]]:
    """The runs with these values."""
    return [run for run in runs if all(run[key] == value for key, value in wanted.items())]


def draw_start(path: Path) -> None:
    """Losses of embedding and head ternary and float, every seed of three texts."""
    runs = runs_of("pure-start").values()
    figure, panels = plt.subplots(1, 3, figsize=(11.4, 3.6), layout="constrained")
    for axes, (text, title) in zip(panels, TEXTS.items(), strict=True):
        for place, (variant, (_, colour)) in enumerate(STARTS.items()):
            found = chosen(runs, text=text, variant=variant, measured_on="validation", steps=1000)
            losses = [run["loss"] for run in found]
            axes.scatter(
                [place] * len(losses), losses, color=colour, s=36, alpha=0.8, edgecolor="white"
            )
            axes.plot(
                [place - 0.25, place + 0.25],
                [statistics.fmean(losses)] * 2,
                color=colour,
                linewidth=2,
            )
        axes.set_xticks(range(len(STARTS)), [label for label, _ in STARTS.values()], fontsize=8)
        axes.set_xlim(-0.6, len(STARTS) - 0.4)
        axes.set_title(title, fontsize=10)
    panels[0].set_ylabel("validation loss, nats a byte")
    finish(figure, panels, path)


def draw_shapes(path: Path) -> None:
    """Losses of shapes and starts of equal bits, of one seed, and what two runs of one setting
    differ by.
    """
    runs = runs_of("pure-start").values()
    losses = [
        chosen(runs, variant=each, measured_on="choice", steps=400)[0]["loss"] for each in SHAPES
    ]
    figure, axes = plt.subplots(figsize=(7.2, 3.2), layout="constrained")
    axes.axvspan(losses[0] - 0.03, losses[0] + 0.03, color="0.93", zorder=0)
    colours = [BLUE if each == "rest_float" else RED for each in SHAPES]
    axes.scatter(losses, range(len(losses)), color=colours, s=48, zorder=2)
    axes.set_yticks(range(len(losses)), list(SHAPES.values()))
    axes.invert_yaxis()
    axes.set_xlabel("loss, nats a byte, one seed; grey: what two runs of one setting differ by")
    finish(figure, [axes], path)


def draw_ends(path: Path) -> None:
    """Training losses by twelfths of the tokens, those of quantisation-aware training taken off."""
    runs = runs_of("run-end").values()
    figure, panels = plt.subplots(1, 2, figsize=(9.6, 3.8), layout="constrained")
    for axes, (size, (title, base, variants)) in zip(panels, ENDS.items(), strict=True):
        rivals = chosen(runs, size=size, variant=base)
        theirs = _twelfths(rivals)
        seeds = {run["seed"] for run in rivals}
        for variant, (label, colour) in variants.items():
            mine = _twelfths(
                [run for run in chosen(runs, size=size, variant=variant) if run["seed"] in seeds]
            )
            # The first quarter is the warm-up, where differences are ten times as large.
            apart = [a - b for a, b in zip(mine, theirs, strict=True)][3:]
            axes.plot(range(4, 13), apart, color=colour, marker="o", markersize=4, label=label)
        axes.axhline(0.0, color="0.4", linewidth=0.8)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("twelfth of the tokens")
        axes.legend(
            frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2
        )
    panels[0].set_ylabel("training loss less that of QAT, nats")
    finish(figure, panels, path)


def _twelfths(runs: Sequence[Mapping[str, Any]]) -> list[float]:
    series = [run["training_loss_by_twelfth_of_tokens"] for run in runs]
    return [statistics.fmean(losses) for losses in zip(*series, strict=True)]


def draw_orthogonal(path: Path) -> None:
    """Over a long run what orthogonalised gradients are ahead of the plain rule, and at every width
    behind float32.
    """
    figure, (over_tokens, over_widths) = plt.subplots(
        1, 2, figsize=(9.6, 4.2), layout="constrained"
    )
    curves = {
        rule["name"]: _curve(rule)
        for name in ("small", "orthogonal")
        for rule in _rules(f"quality-{name}")
    }
    plain = curves["scaled_votes"]
    for name, (label, colour) in RULES.items():
        apart = [loss - other for (_, loss), (_, other) in zip(curves[name], plain, strict=True)]
        over_tokens.plot(
            [tokens / 1e6 for tokens, _ in plain],
            apart,
            color=colour,
            marker="o",
            markersize=3,
            label=label,
        )
    over_tokens.axhline(0.0, color="0.4", linewidth=0.8)
    over_tokens.set_xlabel("tokens, millions; 1.1 million weights")
    over_tokens.set_ylabel("loss less that of scaled votes, nats")
    over_tokens.legend(frameon=False, fontsize=8)
    result = json.loads((RESULTS / "ladder.json").read_text(encoding="utf-8"))
    found = {(each["way"], each["width"]): each for each in points(result)}
    for way, (label, colour) in WAYS.items():
        widths = [width for other, width in found if other == way]
        weights = [found[way, width]["weights"] / 1e6 for width in widths]
        apart = [found[way, width]["loss"] - found["float32", width]["loss"] for width in widths]
        over_widths.plot(weights, apart, color=colour, marker="o", markersize=5, label=label)
    over_widths.axhline(0.0, color="0.4", linewidth=0.8)
    over_widths.set_xscale("log")
    over_widths.set_xlabel("linear weights, millions; 2.1 million tokens")
    over_widths.set_ylabel("loss less that of float32, nats")
    over_widths.legend(frameon=False, fontsize=8)
    finish(figure, [over_tokens, over_widths], path)


def _rules(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(
        (RESULTS / f"{name}.json").read_text(encoding="utf-8")
    )["rules"]
    return found


def _curve(rule: Mapping[str, Any]) -> list[tuple[int, float]]:
    """Tokens, and the mean validation loss over seeds."""
    return [
        (of_seeds[0][0], statistics.fmean(loss for _, loss in of_seeds))
        for of_seeds in zip(*rule["curves"], strict=True)
    ]


def draw_rates(path: Path) -> None:
    """Loss over the rate of votes on the configs that the rule was not made from, and the rule's
    rate.
    """
    runs = runs_of("auto-rate")
    names = [name for name in CONFIGS if name not in FITTED | REFUSED]
    figure, panels = plt.subplots(1, len(names), figsize=(11.4, 3.8), layout="constrained")
    for axes, name in zip(panels, names, strict=True):
        seeds = seeds_of(runs, name)
        for asked in (*CONFIGS[name][-1], "auto"):
            found = [runs[f"{name}, {asked}, seed {seed}"] for seed in seeds]
            losses = [run["loss"] for run in found]
            colour, marker, size = (RED, "*", 190) if asked == "auto" else (BLUE, "o", 40)
            axes.scatter([run["rate"] for run in found], losses, color=colour, s=12, alpha=0.5)
            axes.scatter(
                [found[0]["rate"]],
                [statistics.fmean(losses)],
                color=colour,
                marker=marker,
                s=size,
                zorder=3,
            )
        axes.set_xscale("log")
        axes.set_xticks(CONFIGS[name][-1], [f"{rate:g}" for rate in CONFIGS[name][-1]])
        axes.minorticks_off()
        axes.set_title(textwrap.fill(name, 45), fontsize=9)
        axes.set_xlabel("rate of votes")
    panels[0].set_ylabel(f"loss, nats a byte; small: {len(seeds)} seeds; star: auto")
    finish(figure, panels, path)


def main() -> None:
    """Draw all five."""
    folder = Path(sys.argv[1])
    draw_start(folder / "pure-start.png")
    draw_shapes(folder / "shapes.png")
    draw_ends(folder / "run-end.png")
    draw_orthogonal(folder / "orthogonal.png")
    draw_rates(folder / "auto-rate.png")


if __name__ == "__main__":
    main()
