"""The figures of a report, as PNG."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from arb_ternary_train.plot import smoothed
from arb_ternary_upcycle.report.contents import Contents, Curve
from arb_ternary_upcycle.report.tables import shown

#: Colours of the two models, also on the page; colour-blind readers can tell them apart (Okabe and
#: Ito, 2008).
COLOURS: Final = {"teacher": "#0072B2", "student": "#D55E00"}
_LINES: Final = (*COLOURS.values(), "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#404040")
_INK: Final = "#3d4451"
_LINEAR: Final = re.compile(r"blocks\.(\d+)\.(?:attention\.|feed_forward\.)?(.+)")
_MIB: Final = 2.0**20


def draw_figures(contents: Contents) -> dict[str, bytes]:
    """Draw what there are numbers for; PNG files by their names without ending."""
    drawn: dict[str, bytes] = {}
    for name, draw in _DRAWN.items():
        table = contents.table(name)
        image = None if table is None else draw(table.rows)
        if image is not None:
            drawn[name] = image
    if contents.curves:
        drawn["training"] = _training(contents.curves)
    return drawn


_Rows = Sequence[Mapping[str, Any]]


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
    return figure, panels


def _png(figure: Any) -> bytes:
    file = io.BytesIO()
    # Without the version of the library and the date, the same numbers give the same file.
    figure.savefig(file, format="png", metadata={"Software": None})
    return file.getvalue()


def _grouped_bars(
    axes: Any, labels: Sequence[str], heights: Mapping[str, Sequence[float]], colours: Sequence[str]
) -> None:
    """Draw two bars beside each other for each label."""
    for shift, (name, values), colour in zip((-0.2, 0.2), heights.items(), colours, strict=True):
        axes.bar(np.arange(len(values)) + shift, values, 0.38, color=colour, label=name)
    axes.set_xticks(range(len(labels)), labels, fontsize=8)
    axes.grid(axis="x", visible=False)


def _perplexity(rows: _Rows) -> bytes | None:
    values = [row["perplexity"] for row in rows]
    if not all(np.isfinite(values)):
        return None
    figure, (axes,) = _canvas(8.0, 1.9)
    models = [row["model"] for row in rows]
    bars = axes.barh(models, values, color=[COLOURS[model] for model in models], height=0.62)
    axes.bar_label(bars, [shown(value, "number") for value in values], padding=5, color=_INK)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    if max(values) > 20 * min(values):
        axes.set_xscale("log")
        axes.set_xlim(1, max(values) * 4)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("perplexity, lower is better")
    return _png(figure)


def _by_model(rows: _Rows) -> dict[str, _Rows]:
    return {name: [row for row in rows if row["model"] == name] for name in COLOURS}


def _size(row: Mapping[str, Any]) -> str:
    return f"{row['prompt']} + {row['generation']} x {row['batch']}"


def _latency(rows: _Rows) -> bytes:
    models = _by_model(rows)
    labels = [_size(row) for row in models["teacher"]]
    figure, panels = _canvas(max(8.0, 2.0 + 1.1 * len(labels)), 3.2, columns=2)
    drawn = {
        "decode, tokens per second": ("decode_tokens_per_second", 1.0),
        "time to first token, ms": ("first_token_seconds", 1e3),
    }
    for axes, (title, (key, factor)) in zip(panels, drawn.items(), strict=True):
        heights = {name: [factor * row[key] for row in found] for name, found in models.items()}
        _grouped_bars(axes, labels, heights, list(COLOURS.values()))
        axes.set_title(title, fontsize=10, color=_INK, loc="left")
    panels[0].set_xlabel("prompt + generated x batch", fontsize=9)
    panels[0].legend(frameon=False, fontsize=8)
    return _png(figure)


def _memory(rows: _Rows) -> bytes:
    figure, (axes,) = _canvas(8.0, 1.4 + 0.62 * len(rows))
    for place, row in enumerate(rows):
        weights = row["weight_bytes"]
        cache = row["kv_cache_bytes"]
        rest = max(0, (row["peak_bytes"] or 0) - weights - cache)
        left = 0.0
        for part, strength in ((weights, 1.0), (cache, 0.55), (rest, 0.22)):
            colour = COLOURS[row["model"]]
            bars = axes.barh(place, part / _MIB, 0.72, left, color=colour, alpha=strength)
            left += part / _MIB
        axes.bar_label(bars, [f"{left:.4g}"], padding=5, fontsize=9, color=_INK)
    names = [f"{row['model']}, {_size(row)}" for row in rows]
    axes.set_yticks(range(len(rows)), names, fontsize=9)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("MiB: weights (dark), keys and values, the rest of the peak (light)")
    axes.margins(x=0.1)
    return _png(figure)


def _projection(rows: _Rows) -> bytes | None:
    """Draw the held-out errors over the blocks, one line for each kind of linear."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        found = _LINEAR.fullmatch(row["name"])
        if found is not None and isinstance(row["held_out"], float):
            lines.setdefault(found[2], []).append((int(found[1]), row["held_out"]))
    if not lines:
        return None
    figure, (axes,) = _canvas(8.0, 3.4)
    for number, (name, points) in enumerate(lines.items()):
        style = "o-" if number < len(_LINES) else "o--"
        colour = _LINES[number % len(_LINES)]
        blocks, errors = zip(*points, strict=True)
        axes.plot(blocks, errors, style, color=colour, markersize=3.5, linewidth=1.4, label=name)
    axes.set_xlabel("block")
    axes.set_ylabel("relative error of the output")
    axes.set_ylim(bottom=0)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=False, fontsize=8, ncols=4)
    return _png(figure)


def _blockwise(rows: _Rows) -> bytes | None:
    # A distance that is not finite is written as a text.
    finite = [row for row in rows if not isinstance(row["l1_first"], str)]
    finite = [row for row in finite if not isinstance(row["l1"], str)]
    if not finite:
        return None
    figure, (axes,) = _canvas(8.0, 2.8)
    heights = {
        "first steps": [row["l1_first"] for row in finite],
        "last steps": [row["l1"] for row in finite],
    }
    labels = [str(row["block"]) for row in finite]
    _grouped_bars(axes, labels, heights, ("0.72", COLOURS["student"]))
    axes.set_xlabel("block")
    axes.set_ylabel("L1 distance to the teacher")
    axes.legend(frameon=False, fontsize=8)
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
            steps, losses = zip(*curve.validation, strict=True)
            axes.plot(steps, losses, "o", color=COLOURS["teacher"], label="validation")
        axes.set_title(curve.title, fontsize=10, color=_INK, loc="left")
        axes.set_xlabel("optimizer step", fontsize=9)
        axes.set_ylabel("loss", fontsize=9)
        axes.legend(frameon=False, fontsize=8)
    return _png(figure)


_DRAWN: Final[Mapping[str, Callable[[_Rows], bytes | None]]] = {
    "perplexity": _perplexity,
    "latency": _latency,
    "memory": _memory,
    "projection": _projection,
    "blockwise": _blockwise,
}
