"""The figures of a report, as PNG."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from arb_ternary_train.plot import smoothed
from arb_ternary_upcycle.report.contents import Contents, Curve
from arb_ternary_upcycle.report.tables import Table, shown

# : Colours of the two models, apart for colour-blind readers too (Okabe and Ito, 2008); the page
# has them as well.
COLOURS: Final = {"teacher": "#0072B2", "student": "#D55E00"}
_FURTHER: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#404040")
_INK: Final = "#3d4451"
_LINEAR: Final = re.compile(r"blocks\.(\d+)\.(.+)")


def draw_figures(contents: Contents) -> dict[str, bytes]:
    """PNG files by their names without ending, of what there is something to draw for."""
    drawn: dict[str, bytes] = {}
    for name, draw in _DRAWN.items():
        table = contents.table(name)
        if table is not None and (image := draw(table)) is not None:
            drawn[name] = image
    if contents.curves:
        drawn["training"] = _training(contents.curves)
    return drawn


def _canvas(width: float, height: float, rows: int = 1, columns: int = 1) -> tuple[Any, list[Any]]:
    # The object interface draws without a display and without global state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    panels = list(np.atleast_1d(figure.subplots(rows, columns)).flatten())
    for axes in panels:
        axes.grid(color="0.92", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color("0.75")
        axes.tick_params(colors=_INK, labelsize=9, length=0)
        axes.xaxis.label.set_color(_INK)
        axes.yaxis.label.set_color(_INK)
    return figure, panels


def _png(figure: Any) -> bytes:
    file = io.BytesIO()
    # Without the version of the library and the date, the same numbers give the same file.
    figure.savefig(file, format="png", metadata={"Software": None})
    return file.getvalue()


def _perplexity(table: Table) -> bytes | None:
    rows = [row for row in table.rows if isinstance(row["perplexity"], float)]
    if len(rows) < len(COLOURS):
        return None
    figure, (axes,) = _canvas(8.0, 1.9)
    for place, row in enumerate(reversed(rows)):
        axes.barh(place, row["perplexity"], color=COLOURS[row["model"]], height=0.62)
        axes.annotate(
            shown(row["perplexity"], "number"),
            (row["perplexity"], place),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontsize=10,
            color=_INK,
        )
    axes.set_yticks(range(len(rows)), [row["model"] for row in reversed(rows)], fontsize=10)
    values = [row["perplexity"] for row in rows]
    if max(values) > 20 * min(values):
        axes.set_xscale("log")
        axes.set_xlim(1, max(values) * 4)
    else:
        axes.set_xlim(0, max(values) * 1.15)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("perplexity, lower is better")
    return _png(figure)


def _sizes(table: Table) -> tuple[list[str], dict[str, list[Mapping[str, Any]]]]:
    """A label for each combination of sizes, and the rows of each model in the same order."""
    by_model: dict[str, list[Mapping[str, Any]]] = {name: [] for name in COLOURS}
    labels: dict[str, None] = {}
    for row in table.rows:
        labels[f"{row['prompt']} + {row['generation']}\nx {row['batch']}"] = None
        by_model[row["model"]].append(row)
    return list(labels), by_model


def _latency(table: Table) -> bytes:
    labels, by_model = _sizes(table)
    figure, panels = _canvas(max(8.0, 2.0 + 1.1 * len(labels)), 3.2, columns=2)
    quantities: tuple[tuple[str, str, Callable[[float], float]], ...] = (
        ("decode_tokens_per_second", "decode, tokens a second", float),
        ("first_token_seconds", "time to first token, ms", lambda seconds: 1e3 * seconds),
    )
    for axes, (key, title, scaled) in zip(panels, quantities, strict=True):
        for offset, (name, rows) in zip((-0.19, 0.19), by_model.items(), strict=True):
            heights = [scaled(row[key]) for row in rows]
            bars = axes.bar(
                np.arange(len(rows)) + offset, heights, 0.36, color=COLOURS[name], label=name
            )
            if len(labels) <= 4:
                axes.bar_label(
                    bars, [f"{height:.4g}" for height in heights], padding=2, fontsize=8, color=_INK
                )
        axes.set_xticks(range(len(labels)), labels, fontsize=8)
        axes.set_title(title, fontsize=10, color=_INK, loc="left")
        axes.grid(axis="x", visible=False)
        axes.margins(y=0.14)
    panels[0].set_xlabel("prompt + generated x batch", fontsize=9)
    panels[0].legend(
        frameon=False, fontsize=8, ncols=2, loc="lower right", bbox_to_anchor=(1.0, 1.0)
    )
    return _png(figure)


def _memory(table: Table) -> bytes:
    labels, by_model = _sizes(table)
    figure, (axes,) = _canvas(8.0, 1.4 + 0.62 * 2 * len(labels))
    places = []
    names = []
    size, unit = _unit(
        max(row["peak_bytes"] or row["weight_bytes"] + row["kv_cache_bytes"] for row in table.rows)
    )
    for number, label in enumerate(labels):
        for offset, (name, rows) in enumerate(by_model.items()):
            place = -(number * 2.5 + offset)
            row = rows[number]
            parts = (row["weight_bytes"], row["kv_cache_bytes"], _rest(row))
            left = 0.0
            for part, strength in zip(parts, (1.0, 0.55, 0.22), strict=True):
                axes.barh(
                    place,
                    part / size,
                    left=left,
                    height=0.72,
                    color=COLOURS[name],
                    alpha=strength,
                    linewidth=0,
                )
                left += part / size
            axes.annotate(
                f"{left:.3g}",
                (left, place),
                xytext=(5, 0),
                textcoords="offset points",
                va="center",
                fontsize=9,
                color=_INK,
            )
            places.append(place)
            names.append(f"{name}\n{' '.join(label.split())}" if len(labels) > 1 else name)
    axes.set_yticks(places, names, fontsize=9)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(f"{unit}: weights (dark), keys and values, the rest of the peak (light)")
    axes.margins(x=0.1)
    return _png(figure)


def _rest(row: Mapping[str, Any]) -> int:
    peak = row["peak_bytes"]
    return 0 if peak is None else max(0, int(peak - row["weight_bytes"] - row["kv_cache_bytes"]))


def _unit(value: float) -> tuple[float, str]:
    for unit, size in (("GiB", 2.0**30), ("MiB", 2.0**20)):
        if value >= size:
            return size, unit
    return 2.0**10, "KiB"


def _projection(table: Table) -> bytes | None:
    """Held-out error of each linear over the blocks, a line for each kind of linear."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in table.rows:
        found = _LINEAR.fullmatch(row["name"])
        if found is not None and isinstance(row["held_out"], float):
            lines.setdefault(
                found[2].removeprefix("attention.").removeprefix("feed_forward."), []
            ).append((int(found[1]), row["held_out"]))
    if not lines:
        return None
    figure, (axes,) = _canvas(8.0, 3.4)
    for number, (name, points) in enumerate(lines.items()):
        colour = _FURTHER[number % len(_FURTHER)]
        style = "-" if number < len(_FURTHER) else "--"
        axes.plot(
            *zip(*points, strict=True),
            style,
            color=colour,
            marker="o",
            markersize=3.5,
            linewidth=1.4,
            label=name,
        )
    axes.set_xlabel("block")
    axes.set_ylabel("relative error of the output")
    axes.set_ylim(bottom=0)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=False, fontsize=8, ncols=4, loc="upper center", bbox_to_anchor=(0.5, 1.2))
    return _png(figure)


def _blockwise(table: Table) -> bytes | None:
    rows = [
        row
        for row in table.rows
        if isinstance(row["l1_first"], float) and isinstance(row["l1"], float)
    ]
    if not rows:
        return None
    figure, (axes,) = _canvas(8.0, 2.8)
    blocks = np.asarray([row["block"] for row in rows])
    axes.bar(
        blocks - 0.2, [row["l1_first"] for row in rows], 0.38, color="0.72", label="first steps"
    )
    axes.bar(
        blocks + 0.2,
        [row["l1"] for row in rows],
        0.38,
        color=COLOURS["student"],
        label="last steps",
    )
    axes.set_xlabel("block")
    axes.set_ylabel("L1 distance to the teacher")
    axes.grid(axis="x", visible=False)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=False, fontsize=8, ncols=2, loc="upper center", bbox_to_anchor=(0.5, 1.16))
    return _png(figure)


def _training(curves: Sequence[Curve]) -> bytes:
    columns = min(2, len(curves))
    rows = -(-len(curves) // columns)
    figure, panels = _canvas(8.0, 2.9 * rows, rows, columns)
    for axes in panels[len(curves) :]:
        axes.set_visible(False)
    for axes, curve in zip(panels, curves, strict=False):
        if curve.training:
            steps, losses = zip(*curve.training, strict=True)
            axes.plot(steps, losses, color=COLOURS["student"], linewidth=0.6, alpha=0.3)
            line = smoothed(losses, len(losses) // 80)
            axes.plot(steps, line, color=COLOURS["student"], linewidth=1.6, label="training")
        if curve.validation:
            axes.plot(
                *zip(*curve.validation, strict=True),
                linestyle="none",
                marker="o",
                markersize=5,
                color=COLOURS["teacher"],
                markerfacecolor="white",
                label="validation",
            )
        axes.set_title(curve.title, fontsize=10, color=_INK, loc="left")
        axes.set_xlabel("optimizer step", fontsize=9)
        axes.set_ylabel("loss", fontsize=9)
        axes.legend(frameon=False, fontsize=8)
    return _png(figure)


_DRAWN: Final[Mapping[str, Callable[[Table], bytes | None]]] = {
    "perplexity": _perplexity,
    "latency": _latency,
    "memory": _memory,
    "projection": _projection,
    "blockwise": _blockwise,
}
