"""The figures of a study: held-out loss over tokens, and final loss over bits of training state."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from arb_ternary.errors import ArbError

# : Categorical colours that stay apart for colour-blind readers (Okabe and Ito, 2008), and dashes
# for a second round.
_COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_DASHES: Final = ("-", "--", ":", "-.")


def draw_losses(result: Mapping[str, Any], destination: Path) -> None:
    """Draw validation loss over tokens to ``destination``: one line a rule, the mean over seeds, in
    the order of ends.

    Raises:
        ArbError: the file cannot be written.
    """
    figure, axes = _canvas(width=9.5)
    lines = {rule["name"]: line for rule in result["rules"] if (line := _mean_curve(rule))}
    styles = _styles(result)
    for name, line in sorted(lines.items(), key=lambda item: -item[1][-1][1]):
        colour, dash = styles[name]
        millions = [tokens / 1e6 for tokens, _ in line]
        losses = [loss for _, loss in line]
        axes.plot(
            millions,
            losses,
            color=colour,
            linestyle=dash,
            linewidth=1.6,
            label=f"{losses[-1]:.3f}  {name}",
        )
    if lines:
        # The first points are high above what the eye should compare.
        finals = [line[-1][1] for line in lines.values()]
        early = max(
            line[max(0, min(len(line) - 2, max(1, len(line) // 8)))][1] for line in lines.values()
        )
        low = min(finals)
        high = max(early, *finals)
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
    axes.set_xlabel("tokens, millions")
    axes.set_ylabel("validation loss, nats a byte")
    axes.set_title(_title(result), fontsize=11)
    _save(figure, destination)


def draw_frontier(result: Mapping[str, Any], destination: Path) -> None:
    """Draw final loss over state bits a linear weight to ``destination``, with standard deviations
    over seeds.

    Raises:
        ArbError: the file cannot be written.
    """
    figure, axes = _canvas(width=8.0)
    styles = _styles(result)
    points = [rule for rule in result["rules"] if rule["validation_loss_mean"] is not None]
    for rule in points:
        bits = rule["state_bits_per_linear_weight"]
        loss = rule["validation_loss_mean"]
        axes.errorbar(
            [bits],
            [loss],
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
    axes.set_xlabel("persistent training state, bits a linear weight")
    axes.set_ylabel("validation loss, nats a byte")
    axes.set_title(_title(result), fontsize=11)
    _save(figure, destination)


def _canvas(width: float) -> tuple[Any, Any]:
    # The object interface draws without a display and without global state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, 5.0), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.grid(color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _save(figure: Any, destination: Path) -> None:
    try:
        figure.savefig(destination)
    except (OSError, ValueError) as error:
        raise ArbError(f"{destination}: the figure cannot be written: {error}") from error


def _title(result: Mapping[str, Any]) -> str:
    seeds = len(result["seeds"])
    return (
        f"size {result['size']}, {result['tokens'] / 1e6:.3g} million tokens, {seeds} "
        f"seed{'s' if seeds > 1 else ''}"
    )


def _styles(result: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Colour and dash of each rule, the same in both figures."""
    return {
        rule["name"]: (
            _COLOURS[index % len(_COLOURS)],
            _DASHES[index // len(_COLOURS) % len(_DASHES)],
        )
        for index, rule in enumerate(result["rules"])
    }


def _mean_curve(rule: Mapping[str, Any]) -> list[tuple[int, float]]:
    """Mean over seeds at every number of tokens that all of them have a loss for."""
    curves = [dict(map(tuple, curve)) for curve in rule["curves"]]
    shared = set.intersection(*map(set, curves)) if curves else set()
    return [
        (tokens, statistics.fmean(curve[tokens] for curve in curves)) for tokens in sorted(shared)
    ]


def _label(axes: Any, points: list[Any], styles: Mapping[str, tuple[str, str]]) -> None:
    """A name beside each point, moved up or down where names would overlap."""
    low, high = axes.get_ylim()
    axes.set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low))
    gap = 0.05 * 1.1 * (high - low)
    taken: list[tuple[float, float]] = []
    for rule in sorted(points, key=lambda each: each["validation_loss_mean"]):
        bits = rule["state_bits_per_linear_weight"]
        loss = rule["validation_loss_mean"]
        height = loss
        while any(abs(height - other) < gap and 1 / 4 < bits / at < 4 for at, other in taken):
            height += gap / 4
        taken.append((bits, height))
        axes.annotate(
            rule["name"],
            (bits, loss),
            xytext=(bits * 1.06, height),
            textcoords="data",
            va="center",
            fontsize=8,
            color=styles[rule["name"]][0],
            arrowprops=None
            if height == loss
            else {"arrowstyle": "-", "color": "0.7", "linewidth": 0.6},
        )
