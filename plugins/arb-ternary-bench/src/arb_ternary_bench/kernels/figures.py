"""The figure of the kernel bench: how many times as fast as torch's bfloat16 linear, over the
number of rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from arb_ternary.errors import ArbError

#: Categorical colours that stay apart for colour-blind readers (Okabe and Ito, 2008).
_COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS: Final = "osD^vPX"
_MOST_COLUMNS: Final = 3
_BASELINE: Final = "torch_bfloat16"


def draw_speedups(result: Mapping[str, Any], destination: Path) -> bool:
    """Draw one panel for each op, shape, group and cache that has a bfloat16 contender; nothing
    where there is none.

    Returns:
        whether there was anything to draw.

    Raises:
        ArbError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = _panels(result)
    if not panels:
        return False
    columns = min(_MOST_COLUMNS, len(panels))
    lines = -(-len(panels) // columns)
    names = list(dict.fromkeys(name for panel in panels.values() for name in panel))
    figure = Figure(figsize=(4.3 * columns, 3.3 * lines + 0.9), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    handles: dict[str, Any] = {}
    for place, (title, panel) in enumerate(panels.items()):
        axes = figure.add_subplot(lines, columns, place + 1)
        for name, points in panel.items():
            index = names.index(name)
            (handles[name],) = axes.plot(
                *zip(*points, strict=True),
                color=_COLOURS[index % len(_COLOURS)],
                linewidth=1.5,
                markersize=4,
                marker=_MARKERS[index // len(_COLOURS) % len(_MARKERS)],
            )
        _dress(axes, title, sorted({m for points in panel.values() for m, _ in points}))
    figure.legend(
        handles.values(),
        handles,
        loc="outside lower center",
        ncols=min(4, len(handles)),
        frameon=False,
    )
    machine = result["machine"]
    where = (
        machine["gpu"]["name"]
        if machine["gpu"]
        else f"{machine['processor']}, threads: {machine['threads']}"
    )
    figure.suptitle(f"times as fast as torch bfloat16; {where}", fontsize=11)
    try:
        figure.savefig(destination)
    except (OSError, ValueError) as error:
        raise ArbError(f"{destination}: the figure cannot be written: {error}") from error
    return True


def _panels(result: Mapping[str, Any]) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """Points ``(M, ratio)`` of each contender, by panel."""
    panels: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for cell in result["cells"]:
        if cell["baselines"][_BASELINE] is None:
            continue
        group = "row" if cell["group_size"] >= cell["in_features"] else cell["group_size"]
        title = (
            f"{cell['op']} {cell['out_features']} x {cell['in_features']}, group {group}, "
            f"{cell['cache']}"
        )
        panel = panels.setdefault(title, {})
        for row in cell["rows"]:
            if row["contender"] == cell["baselines"][_BASELINE]:
                continue  # the line at 1
            panel.setdefault(row["contender"], []).append(
                (cell["rows_m"], row["speedup"][_BASELINE])
            )
    return panels


def _dress(axes: Any, title: str, rows: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(rows, [str(m) for m in rows])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.3g}")
    axes.axhline(1.0, color="0.6", linewidth=0.8)
    axes.grid(color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("rows M", fontsize=9)
    axes.set_title(title, fontsize=9)
    axes.tick_params(labelsize=8)
