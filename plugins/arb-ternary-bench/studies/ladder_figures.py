"""What ``ladder.py`` found, drawn and said: loss over memory, loss over time, distances to float32.

    python plugins/arb-ternary-bench/studies/ladder_figures.py
    plugins/arb-ternary-bench/results/ladder.json docs/images

Writes ``ladder.png`` and ``ladder-time.png`` into the folder and prints the tables of the page that
shows them.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

#: Name in words, colour (Okabe and Ito, 2008) and marker of a way, in the order of the legend.
STYLES: Final[Mapping[str, tuple[str, str, str]]] = {
    "orthogonal": ("votes, orthogonalised", "#882255", "o"),
    "gains": ("votes, orthogonalised, float vectors", "#332288", "o"),
    "vectors": ("votes, float vectors", "#999933", "o"),
    "votes8": ("votes, 8 bits", "#D55E00", "o"),
    "votes4": ("votes, 4 bits", "#E69F00", "o"),
    "pure": ("votes, no float part", "#CC79A7", "o"),
    "trits": ("the same, orthogonalised, vectors of trits", "#AA4499", "o"),
    "qat": ("QAT (BitNet b1.58), AdamW", "#009E73", "s"),
    "qat_gains": ("QAT, gains of all norms", "#44AA99", "s"),
    "float32": ("float32, AdamW", "#0072B2", "D"),
    "adamw8": ("AdamW, 8-bit moments", "#56B4E9", "^"),
    "bfloat16": ("bfloat16, AdamW", "#000000", "v"),
}
VOTES: Final = ("gains", "orthogonal", "vectors", "votes8", "votes4", "trits", "pure")
#: The share of its budget at which float32 is to be reached.
SHARE: Final = 0.8

Point = dict[str, Any]


def points(result: Mapping[str, Any]) -> list[Point]:
    """Every way and width that ran: means over seeds of losses, bytes and speeds."""
    groups: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for run in result["finals"].values():
        groups.setdefault((run["way"], run["width"]), []).append(run)
    weights = {width: runs[0]["linear_weights"] for (_, width), runs in groups.items()}
    found = []
    for (way, width), runs in sorted(groups.items(), key=lambda item: item[0][1]):
        losses = [run["loss"] for run in runs]
        speed = statistics.median(run["tokens_per_second"] for run in runs)
        found.append(
            {
                "way": way,
                "width": width,
                "weights": weights[width],
                "losses": losses,
                "loss": statistics.fmean(losses),
                "kept": runs[0]["state_bytes"] + runs[0]["gradient_bytes"],
                "peak": statistics.median(run["peak_bytes"] for run in runs),
                "speed": speed,
                "processor": statistics.fmean(run["processor_seconds"] for run in runs),
                # Multiplied in float32, it holds more than the others do.
                "float32": any(run.get("float32") for run in runs),
            }
        )
    return found


def table(result: Mapping[str, Any]) -> str:
    """A line a size and a way: mean loss over seeds, bytes of state and gradients, peak, speed and
    processor time.
    """
    lines = [
        "| linear weights | way | validation loss | state and gradients, MB | peak, MB | tokens/s "
        "| processor, s |",
        "|---:|---|---:|---:|---:|---:|---:|",
    ]
    found = {(each["width"], each["way"]): each for each in points(result)}
    for width in sorted({width for width, _ in found}):
        for each in (found[width, way] for way in STYLES if (width, way) in found):
            cells = [
                _millions(each),
                each["way"],
                _mean(each["losses"]),
                f"{each['kept'] / 1e6:.1f}",
            ]
            cells += [
                f"{each['peak'] / 1e6:.0f}",
                f"{each['speed']:,.0f}",
                f"{each['processor']:.0f}",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw_memory(result: Mapping[str, Any], path: Path) -> None:
    """Loss over bytes of state and gradients, and over what a process holds at its peak: of runs in
    bfloat16 alone.
    """
    found = points(result)
    figure, panels = plt.subplots(1, 2, figsize=(11.5, 5.2), sharey=True, layout="constrained")
    for way, (label, colour, marker) in STYLES.items():
        mine = [each for each in found if each["way"] == way]
        front = way in VOTES
        for axes, what in zip(panels, ("kept", "peak"), strict=True):
            shown = [each for each in mine if what == "kept" or not each["float32"]]
            at = [each[what] / 1e6 for each in shown]
            axes.plot(
                at,
                [each["loss"] for each in shown],
                color=colour,
                marker=marker,
                markersize=7,
                label=label,
                linewidth=2.2 if front else 1.3,
                linestyle="-" if front else (0, (5, 2)),
                zorder=3 if front else 2,
                markeredgecolor="white",
                markeredgewidth=0.8,
            )
            for place, each in zip(at, shown, strict=True):
                if len(each["losses"]) > 1:
                    ends = [min(each["losses"]), max(each["losses"])]
                    axes.plot(
                        [place, place], ends, color=colour, linewidth=1.0, alpha=0.6, zorder=1
                    )
    labels_below = ("training state and stored gradients", "peak resident memory of the process")
    for axes, what in zip(panels, labels_below, strict=True):
        axes.set_xscale("log")
        axes.set_xlabel(f"{what}, MB")
        axes.xaxis.set_major_locator(
            LogLocator(subs=(1, 2, 3, 4, 5, 6, 8) if axes is panels[1] else (1, 2, 5))
        )
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
    panels[0].set_ylabel("validation loss, nats a byte")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    sizes = ", ".join(
        f"{weights / 1e6:.1f}" for weights in sorted({each["weights"] for each in found})
    )
    tokens = result["text"]["tokens_of_a_run"]
    figure.suptitle(
        f"Equal tokens ({tokens:,}), {sizes} million linear weights from left to right", fontsize=11
    )
    finish(figure, panels, path)


def curves(result: Mapping[str, Any], width: int) -> dict[str, list[tuple[float, float, float]]]:
    """Tokens, seconds and loss of the ways whose speed is known at a width; seconds of training at
    their best speed.
    """
    speeds = result["tokens_per_second"]
    found = {}
    for run in result["finals"].values():
        if (run["width"], run["seed"]) == (width, 0) and run["way"] in speeds:
            speed = max(speeds[run["way"]], speeds.get(f"{run['way']}-compiled", 0.0))
            found[run["way"]] = [(tokens, tokens / speed, loss) for tokens, loss in run["curve"]]
    return found


def reached(curve: Sequence[tuple[float, float, float]], loss: float) -> float | None:
    """Seconds until a curve is at ``loss``, between two of its points on the straight line; None
    where it never is.
    """
    for (_, early, high), (_, late, low) in pairwise(curve):
        if high >= loss >= low:
            return early + (late - early) * ((high - loss) / (high - low) if high > low else 0.0)
    return None


def loss_at(curve: Sequence[tuple[float, float, float]], tokens: float) -> float:
    """The loss of a curve after so many tokens, between two of its points on the straight line."""
    for (early, _, high), (late, _, low) in pairwise(curve):
        if early <= tokens <= late:
            return high + (low - high) * (tokens - early) / (late - early)
    raise ValueError(f"the curve does not reach {tokens:,} tokens")


def draw_time(result: Mapping[str, Any], path: Path) -> None:
    """Loss over seconds of training at the largest width."""
    width = max(run["width"] for run in result["finals"].values())
    found = curves(result, width)
    figure, axes = _draw_curves({way: [each[1:] for each in curve] for way, curve in found.items()})
    target = loss_at(found["float32"], SHARE * result["text"]["tokens_of_a_run"])
    axes.axhline(target, color="#0072B2", linewidth=0.8, linestyle=":")
    axes.annotate(
        f"float32 after {SHARE:.0%} of its budget",
        (axes.get_xlim()[0], target),
        xytext=(6, 3),
        textcoords="offset points",
        fontsize=8,
        color="#0072B2",
    )
    axes.set_xlabel("seconds of training, one thread")
    axes.set_title(
        f"{_weights(result, width) / 1e6:.1f} million linear weights, equal tokens", fontsize=11
    )
    finish(figure, [axes], path)


def draw_tokens(result: Mapping[str, Any], path: Path) -> None:
    """Loss over tokens at the largest width, one seed of each way."""
    runs = result["finals"].values()
    width = max(run["width"] for run in runs)
    series = {
        run["way"]: [(tokens / 1e6, loss) for tokens, loss in run["curve"]]
        for run in runs
        if (run["width"], run["seed"]) == (width, 0)
    }
    figure, axes = _draw_curves(series)
    axes.set_xlabel("million tokens")
    axes.set_title(
        f"{_weights(result, width) / 1e6:.1f} million linear weights, one seed", fontsize=11
    )
    finish(figure, [axes], path)


def _draw_curves(series: Mapping[str, Sequence[tuple[float, float]]]) -> tuple[Figure, Axes]:
    """A figure of losses over something, a line a way, with the last loss of each in the legend."""
    figure, axes = plt.subplots(figsize=(8.2, 4.8), layout="constrained")
    for way, (label, colour, marker) in STYLES.items():
        if way in series:
            places, losses = zip(*series[way], strict=True)
            axes.plot(
                places,
                losses,
                color=colour,
                marker=marker,
                markersize=5,
                linewidth=2.2 if way in VOTES else 1.3,
                linestyle="-" if way in VOTES else (0, (5, 2)),
                label=f"{losses[-1]:.3f}  {label}",
            )
    axes.set_ylabel("validation loss, nats a byte")
    axes.legend(
        frameon=False, title="loss at the end", alignment="left", fontsize=9, title_fontsize=9
    )
    return figure, axes


def _weights(result: Mapping[str, Any], width: int) -> int:
    found: int = next(
        run["linear_weights"] for run in result["finals"].values() if run["width"] == width
    )
    return found


def finish(figure: Figure, panels: Iterable[Axes], path: Path) -> None:
    """Give panels their grid and write the figure."""
    for axes in panels:
        axes.grid(color="0.9", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def budgets(result: Mapping[str, Any]) -> str:
    """For every model trained without votes: the best trained with votes in no more bytes."""
    lines = [
        "| way, linear weights | MB | loss | the best votes in no more bytes | MB | loss | lead |"
    ]
    lines.append("|---|---:|---:|---|---:|---:|---:|")
    found = points(result)
    for each in sorted(
        (one for one in found if one["way"] not in VOTES), key=lambda one: one["kept"]
    ):
        within = [one for one in found if one["way"] in VOTES and one["kept"] <= each["kept"]]
        if within:
            best = min(within, key=lambda one: one["loss"])
            cells = [
                f"{each['way']}, {_millions(each)}",
                f"{each['kept'] / 1e6:.1f}",
                f"{each['loss']:.3f}",
            ]
            cells += [
                f"{best['way']}, {_millions(best)}",
                f"{best['kept'] / 1e6:.1f}",
                f"{best['loss']:.3f}",
            ]
            lines.append(f"| {' | '.join(cells)} | {each['loss'] - best['loss']:+.3f} |")
    return "\n".join(lines)


def distances(result: Mapping[str, Any]) -> str:
    """Loss minus that of float32, a line a size: means over the seeds that both have."""
    found = {(each["way"], each["width"]): each for each in points(result)}
    ways = [way for way in STYLES if way != "float32" and any(way == there for there, _ in found)]
    lines = [
        f"| linear weights | float32 | {' | '.join(ways)} |",
        f"|---:|---:|{'---:|' * len(ways)}",
    ]
    for width in sorted({width for _, width in found}):
        base = found["float32", width]
        cells = [_millions(base), _mean(base["losses"])]
        for way in ways:
            pairs = (
                zip(found[way, width]["losses"], base["losses"], strict=False)
                if (way, width) in found
                else ()
            )
            cells.append(_mean([mine - theirs for mine, theirs in pairs], "+"))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _mean(values: Sequence[float], sign: str = "") -> str:
    if not values:
        return "-"
    spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):{sign}.3f}{spread}"


def _millions(point: Point) -> str:
    return f"{point['weights'] / 1e6:.1f} M"


def times(result: Mapping[str, Any]) -> str:
    """At the largest width: speeds, and seconds until the loss of float32 after a share of its
    budget.
    """
    width = max(run["width"] for run in result["finals"].values())
    found = curves(result, width)
    target = loss_at(found["float32"], SHARE * result["text"]["tokens_of_a_run"])
    base = reached(found["float32"], target)
    speeds = result["tokens_per_second"]
    lines = [
        f"| way | tokens/s | compiled | seconds until {target:.3f}, of float32's | loss at the end "
        f"|",
        "|---|---:|---:|---:|---:|",
    ]
    for way in STYLES:
        if way in found:
            seconds = reached(found[way], target)
            share = (
                "not reached"
                if seconds is None or base is None
                else f"{seconds:.0f} ({seconds / base:.2f}x)"
            )
            second = f"{speeds[f'{way}-compiled']:,.0f}" if f"{way}-compiled" in speeds else ""
            lines.append(
                f"| {way} | {speeds[way]:,.0f} | {second} | {share} | {found[way][-1][2]:.3f} |"
            )
    return "\n".join(lines)


def scale(result: Mapping[str, Any]) -> str:
    """A line a run of ``scale.py``: loss, and that of float32 at the same width taken off."""
    lines = [
        "| linear weights | way | validation loss | to float32 | state and gradients, MB | "
        "processor, minutes |"
    ]
    lines.append("|---:|---|---:|---:|---:|---:|")
    found = {(each["width"], each["way"]): each for each in points(result)}
    for width in sorted({width for width, _ in found}):
        base = found.get((width, "float32"))
        for each in (found[width, way] for way in STYLES if (width, way) in found):
            distance = f"{each['loss'] - base['loss']:+.3f}" if base and base is not each else ""
            cells = [
                _millions(each),
                each["way"],
                _mean(each["losses"]),
                distance,
                f"{each['kept'] / 1e6:.1f}",
            ]
            lines.append(f"| {' | '.join(cells)} | {each['processor'] / 60:.0f} |")
    return "\n".join(lines)


def main() -> None:
    """Draw both figures and print the tables."""
    result = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    folder = Path(sys.argv[2])
    draw_memory(result, folder / "ladder.png")
    draw_time(result, folder / "ladder-time.png")
    print("\n\n".join((table(result), budgets(result), distances(result), times(result))))


if __name__ == "__main__":
    main()
