"""The figure of the kernel bench: speed relative to torch in bfloat16, over the number of rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from arb_ternary_bench.figure import COLOURS, dress, new_figure, save

_MARKERS: Final = "osD^vPX"
_MOST_COLUMNS: Final = 3
_BASELINE: Final = "torch_bfloat16"

#: Points ``(M, ratio)`` by contender.
Panel = dict[str, list[tuple[int, float]]]


def draw_speedups(result: Mapping[str, Any], destination: Path) -> bool:
    """Draw one panel per op, shape, group and cache that has a bfloat16 contender.

    Returns:
        whether there was anything to draw.

    Raises:
        ArbError: the file cannot be written.
    """
    panels = _panels(result)
    if not panels:
        return False
    columns = min(_MOST_COLUMNS, len(panels))
    lines = -(-len(panels) // columns)
    names = list(dict.fromkeys(name for panel in panels.values() for name in panel))
    figure = new_figure(4.3 * columns, 3.3 * lines + 0.9)
    handles: dict[str, Any] = {}
    for place, (title, panel) in enumerate(panels.items(), 1):
        axes = figure.add_subplot(lines, columns, place)
        for name, points in panel.items():
            index = names.index(name)
            rows, ratios = zip(*points, strict=True)
            (handles[name],) = axes.plot(
                rows,
                ratios,
                color=COLOURS[index % len(COLOURS)],
                linewidth=1.5,
                markersize=4,
                marker=_MARKERS[index // len(COLOURS) % len(_MARKERS)],
            )
        _label(axes, title, sorted({m for points in panel.values() for m, _ in points}))
    columns = min(4, len(handles))
    figure.legend(
        handles.values(), handles, loc="outside lower center", ncols=columns, frameon=False
    )
    machine = result["machine"]
    where = f"{machine['processor']}, threads: {machine['threads']}"
    if machine["gpu"]:
        where = machine["gpu"]["name"]
    figure.suptitle(f"times as fast as torch bfloat16; {where}", fontsize=11)
    save(figure, destination)
    return True


def _panels(result: Mapping[str, Any]) -> dict[str, Panel]:
    panels: dict[str, Panel] = {}
    for cell in result["cells"]:
        baseline = cell["baselines"][_BASELINE]
        if baseline is None:
            continue
        group = "row" if cell["group_size"] >= cell["in_features"] else cell["group_size"]
        shape = f"{cell['out_features']} x {cell['in_features']}"
        panel = panels.setdefault(f"{cell['op']} {shape}, group {group}, {cell['cache']}", {})
        for row in cell["rows"]:
            if row["contender"] != baseline:  # it is the line at 1
                point = (cell["rows_m"], row["speedup"][_BASELINE])
                panel.setdefault(row["contender"], []).append(point)
    return panels


def _label(axes: Any, title: str, rows: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(rows, [str(m) for m in rows])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.3g}")
    axes.axhline(1.0, color="0.6", linewidth=0.8)
    dress(axes)
    axes.set_xlabel("rows M", fontsize=9)
    axes.set_title(title, fontsize=9)
    axes.tick_params(labelsize=8)
