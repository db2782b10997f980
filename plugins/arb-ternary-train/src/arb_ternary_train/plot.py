"""A figure of loss over steps."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from arb_ternary.errors import ArbError
from arb_ternary_train.directory import RunDirectory
from arb_ternary_train.metrics import read_metrics
from arb_ternary_train.plot_marks import Mark, draw_marks, marks_in

#: Categorical colours that stay apart for colour-blind readers (Okabe and Ito, 2008).
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


def smoothed(values: Sequence[float], reach: int) -> list[float]:
    """Centred moving average over ``reach`` values on either side, fewer near the ends: it does not
    lag behind.
    """
    sums = [0.0, *accumulate(values)]
    out = []
    for index in range(len(values)):
        first = max(0, index - reach)
        last = min(len(values), index + reach + 1)
        out.append((sums[last] - sums[first]) / (last - first))
    return out


def plot_runs(runs: Sequence[RunDirectory], destination: Path, metric: str = "loss") -> None:
    """Draw the runs to ``destination`` (its ending chooses the format; PNG, SVG, PDF).

    ``metric`` in training (thin: every step; thick: smoothed) and in evaluations, as points. Of the
    loss also what simple predictors reach on the same samples, as horizontal lines, where a
    finished run has measured it. Vertical lines where a record of the metrics has a text ``mark``
    and a ``mark_kind``: something was decided there. Below, the micro-batches of each step, where a
    run took more than one.

    Raises:
        ArbError: a run has no step yet, or nothing of that name, or the file cannot be written.
    """
    # The object interface draws without a display and without global state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 5.0), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    metrics = [read_metrics(run.metrics_file) for run in runs]
    draws = [_points(records, "train", "draws") for records in metrics]
    if any(count != 1 for points in draws for _, count in points):
        axes, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
        _draw_draws(lower, draws)
    else:
        axes = lower = figure.add_subplot()
    baselines: dict[str, float] = {}
    top: list[float] = []
    marks: list[tuple[str, list[Mark]]] = []
    span = 0
    for index, (run, records) in enumerate(zip(runs, metrics, strict=True)):
        colour = _COLOURS[index % len(_COLOURS)]
        train = _points(records, "train", metric)
        validation = _points(records, "validation", metric)
        if not train and not validation:
            raise _nothing_of(metric, run, records)
        if train:
            steps, values = zip(*train, strict=True)
            label = run.path.name if len(runs) > 1 else "training"
            line = smoothed(values, len(values) // 80)
            axes.plot(steps, values, color=colour, linewidth=0.6, alpha=0.3)
            axes.plot(steps, line, color=colour, linewidth=1.6, label=label)
            top.append(max(line))
        top.extend(value for _, value in validation)
        marks.append((colour, marks_in(records)))
        span = max(span, *(points[-1][0] for points in (train, validation) if points))
        if validation:
            shown = f"{run.path.name}, validation" if len(runs) > 1 else "validation"
            axes.plot(
                *zip(*validation, strict=True),
                color=colour,
                linestyle="none" if train else "-",
                marker="o",
                markersize=5,
                markerfacecolor="white",
                label=shown,
            )
        if metric == "loss":
            baselines.update(_baselines(run))
    draw_marks(axes, marks, span)
    for rank, (name, value) in enumerate(sorted(baselines.items(), key=lambda item: -item[1])):
        axes.axhline(value, color="0.35", linewidth=1.0, linestyle=":" if rank else "--")
        axes.annotate(
            f"{name} {value:.3f}",
            (1.0, value),
            xycoords=("axes fraction", "data"),
            xytext=(-4, 3),
            textcoords="offset points",
            ha="right",
            fontsize=8,
            color="0.35",
        )
    lower.set_xlabel("optimizer step")
    units = {str(run.record().get("loss_unit", "nats per token")) for run in runs}
    axes.set_ylabel(
        f"loss, {' or '.join(sorted(units))}" if metric == "loss" else metric.replace("_", " ")
    )
    axes.set_title(
        " and ".join(run.path.name for run in runs) if len(runs) < 3 else f"{len(runs)} runs",
        fontsize=11,
    )
    axes.set_ylim(top=max([*top, *baselines.values()]) * 1.05)
    for each in {axes, lower}:
        each.grid(color="0.9", linewidth=0.6)
        each.set_axisbelow(True)
        each.spines[["top", "right"]].set_visible(False)
    axes.legend(edgecolor="none", framealpha=0.9, fontsize=9)
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(destination)
    except (OSError, ValueError) as error:
        raise ArbError(f"{destination}: the figure cannot be written: {error}") from error


def _nothing_of(metric: str, run: RunDirectory, records: Sequence[dict[str, Any]]) -> ArbError:
    """The run has no number called ``metric``."""
    numbers = {
        key
        for record in records
        if record.get("event") in ("train", "validation")
        for key, value in record.items()
        if isinstance(value, int | float) and key != "step"
    }
    if not numbers:
        return ArbError(
            f"{run.metrics_file}: no step has been taken yet, so that there is nothing to draw"
        )
    return ArbError(
        f"{run.metrics_file}: there is no number {metric!r} in it",
        f"It has {', '.join(sorted(numbers))}.",
    )


def _draw_draws(axes: Any, draws: Sequence[Sequence[tuple[int, float]]]) -> None:
    """Micro-batches a step of each run: thin every step, thick smoothed."""
    for index, points in enumerate(points for points in draws if points):
        colour = _COLOURS[index % len(_COLOURS)]
        steps, counts = zip(*points, strict=True)
        axes.plot(steps, counts, color=colour, linewidth=0.6, alpha=0.3)
        axes.plot(steps, smoothed(counts, len(counts) // 80), color=colour, linewidth=1.6)
    axes.set_ylabel("draws a step")
    axes.set_ylim(bottom=0)


def _points(
    records: Sequence[dict[str, Any]], event: str, key: str = "loss"
) -> list[tuple[int, float]]:
    """Step and ``key`` of each record of ``event``; a number that is not finite is a string there
    and is left out.
    """
    found = [
        (record["step"], record.get(key)) for record in records if record.get("event") == event
    ]
    return [(step, value) for step, value in found if isinstance(value, int | float)]


def _baselines(run: RunDirectory) -> dict[str, float]:
    if not run.result_file.exists():
        return {}
    try:
        result = json.loads(run.result_file.read_text(encoding="utf-8"))
        return {name.replace("_", " "): float(result[name]) for name in result["baselines"]}
    except (OSError, ValueError, KeyError) as error:
        raise ArbError(f"{run.result_file}: cannot be read: {error}") from error
