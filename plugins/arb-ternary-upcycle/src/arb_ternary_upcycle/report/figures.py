"""The figures of a report."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from arb_ternary_train.plot import draw_curves, new_figure
from arb_ternary_train.report_page.tables import Table
from arb_ternary_upcycle.report.contents import Contents

#: Colours of the two models; colour-blind readers can tell them apart (Okabe and
#: Ito, 2008).
COLOURS: Final = {"teacher": "#0072B2", "student": "#D55E00"}
_LINES: Final = (*COLOURS.values(), "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#404040")
_INK: Final = "#3d4451"
_LINEAR: Final = re.compile(r"blocks\.(\d+)\.(?:attention\.|feed_forward\.)?(.+)")
_MIB: Final = 2.0**-20

#: Numbers of each table that are compared as bars: key of the rows, title and factor.
_COMPARED: Final[Mapping[str, Sequence[tuple[str, str, float]]]] = {
    "perplexity": (("perplexity", "perplexity, lower is better", 1.0),),
    "latency": (
        ("decode_tokens_per_second", "decode, tokens per second", 1.0),
        ("first_token_seconds", "time to first token, ms", 1e3),
    ),
    "memory": (
        ("weight_bytes", "weights, MiB", _MIB),
        ("kv_cache_bytes", "keys and values, MiB", _MIB),
        ("peak_bytes", "peak, MiB", _MIB),
    ),
}

#: Points of a line by its name.
Lines = Mapping[str, Sequence[tuple[int, float]]]


def draw_figures(contents: Contents) -> dict[str, Any]:
    """Draw what there are numbers for; figures of matplotlib by the names of tables.

    The figures ``training`` (of the newest run), ``training-1``, ... belong to no table.
    """
    drawn: dict[str, Any] = {}
    for name, quantities in _COMPARED.items():
        table = contents.table(name)
        if table is not None:
            drawn[name] = _bars(table, quantities)
    errors = _errors_by_linear(contents.table("projection"))
    if errors:
        drawn["projection"] = _lines(errors, "relative error of the output")
    distances = _distances(contents.table("blockwise"))
    if distances["last steps"]:
        drawn["blockwise"] = _lines(distances, "L1 distance to the teacher")
    for number, curves in enumerate(contents.curves):
        name = f"training-{number}" if number else "training"
        drawn[name] = draw_curves([curves], "loss")
    return drawn


def _canvas(width: float, height: float, columns: int = 1) -> tuple[Any, list[Any]]:
    figure = new_figure(width, height, dpi=160)
    panels = list(np.atleast_1d(figure.subplots(1, columns)).flatten())
    for axes in panels:
        axes.grid(color="0.92", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color("0.75")
        axes.tick_params(colors=_INK, labelsize=9, length=0)
    return figure, panels


def _bars(table: Table, quantities: Sequence[tuple[str, str, float]]) -> Any:
    """Draw one panel per quantity, with a bar for each model at each combination of sizes."""
    models = {name: [row for row in table.rows if row["model"] == name] for name in COLOURS}
    sizes = [
        f"{row['prompt']} + {row['generation']}\nx {row['batch']}" if "prompt" in row else ""
        for row in models["teacher"]
    ]
    figure, panels = _canvas(
        max(8.0, 1.1 * len(sizes) * len(quantities)), 3.0, columns=len(quantities)
    )
    for axes, (key, title, factor) in zip(panels, quantities, strict=True):
        for shift, (name, rows) in zip((-0.2, 0.2), models.items(), strict=True):
            # What is not known, or not finite, has no bar.
            heights = [np.nan if row[key] is None else factor * row[key] for row in rows]
            heights = [height if np.isfinite(height) else 0.0 for height in heights]
            places = np.arange(len(rows)) + shift
            bars = axes.bar(places, heights, 0.38, color=COLOURS[name], label=name)
            axes.bar_label(bars, fmt="%.3g", padding=2, fontsize=8, color=_INK)
        axes.set_xticks(range(len(sizes)), sizes, fontsize=8)
        axes.set_title(title, fontsize=10, color=_INK, loc="left")
        axes.grid(axis="x", visible=False)
        axes.margins(y=0.14)
    # Above the panels, where it hides no bar.
    handles, labels = panels[0].get_legend_handles_labels()
    place = "outside upper left"
    figure.legend(handles, labels, loc=place, ncols=2, frameon=False, fontsize=8)
    return figure


def _lines(lines: Lines, title: str) -> Any:
    """Draw lines over the blocks."""
    figure, (axes,) = _canvas(8.0, 3.4)
    for number, (name, points) in enumerate(lines.items()):
        style = "o-" if number < len(_LINES) else "o--"
        colour = _LINES[number % len(_LINES)]
        blocks, values = zip(*points, strict=True)
        axes.plot(blocks, values, style, color=colour, markersize=3.5, linewidth=1.4, label=name)
    axes.set_xlabel("block")
    axes.set_ylabel(title)
    axes.set_ylim(bottom=0)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=False, fontsize=8, ncols=4)
    return figure


def _errors_by_linear(table: Table | None) -> Lines:
    """Return the held-out errors over the blocks for each kind of linear."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in table.rows if table is not None else ():
        found = _LINEAR.fullmatch(row["name"])
        if found is not None and isinstance(row["held_out"], float):
            lines.setdefault(found[2], []).append((int(found[1]), row["held_out"]))
    return lines


def _distances(table: Table | None) -> Lines:
    """Return each block's distance from the teacher before and after its training."""
    first = []
    last = []
    for row in table.rows if table is not None else ():
        # A distance that is not finite is written as a text.
        if isinstance(row["l1_first"], float) and isinstance(row["l1"], float):
            first.append((row["block"], row["l1_first"]))
            last.append((row["block"], row["l1"]))
    return {"first steps": first, "last steps": last}
