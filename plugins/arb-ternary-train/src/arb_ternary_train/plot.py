"""A figure of loss over steps, with baselines and marks of decisions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

from attrs import frozen

from arb_ternary.errors import ArbError
from arb_ternary_train.directory import RunDirectory
from arb_ternary_train.durable import replacing
from arb_ternary_train.metrics import metric_names, read_metrics

#: Categorical colours that colour-blind readers can distinguish (Okabe and Ito, 2008).
_COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
#: Colour (for a single run) and line style of kinds of marks, and of any other kind.
_LOOKS: Final = {
    "switch": ("#333333", (0, (5, 2))),
    "rollback": ("#B2182B", "solid"),
    "branch": ("#888888", (0, (1, 2))),
}
_OTHER_LOOK: Final = ("#888888", "dashdot")
#: Texts of marks that are closer than this share of the steps would overlap: the later is left out.
_CLOSEST: Final = 0.02
#: Longest text of a mark.
_LONGEST: Final = 28

Points = Sequence[tuple[int, float]]


@frozen
class Mark:
    """A step at which something was decided.

    Attributes:
        step: the step.
        text: what was decided, in a word or two.
        kind: its kind: ``switch``, ``rollback``, ...
    """

    step: int
    text: str
    kind: str


@frozen
class RunCurves:
    """The curves of one run.

    Attributes:
        run: the run.
        colour: its colour.
        train: the metric of each step.
        validation: the metric of each evaluation.
        draws: micro-batches of each step.
        marks: marks of decisions.
    """

    run: RunDirectory
    colour: str
    train: Points
    validation: Points
    draws: Points
    marks: Sequence[Mark]

    @property
    def name(self) -> str:
        """The name of the run; matplotlib takes text between dollar signs for a formula."""
        return self.run.path.resolve().name.replace("$", r"\$")

    @property
    def last_step(self) -> int:
        """The last step that has a point."""
        return max(points[-1][0] for points in (self.train, self.validation) if points)


def smoothed(values: Sequence[float], reach: int) -> list[float]:
    """Return a centred moving average over ``reach`` values on either side, fewer near the ends.

    It does not lag behind.
    """
    sums = [0.0, *accumulate(values)]
    out = []
    for index in range(len(values)):
        first = max(0, index - reach)
        last = min(len(values), index + reach + 1)
        out.append((sums[last] - sums[first]) / (last - first))
    return out


def plot_runs(runs: Sequence[RunDirectory], destination: Path, metric: str = "loss") -> None:
    """Draw runs to ``destination``, whose ending chooses the format (PNG, SVG, PDF).

    The figure shows ``metric`` in training (thin: every step; thick: smoothed) and in evaluations,
    as points. For the loss, horizontal lines show what simple predictors reach on the same samples,
    if a finished run has measured it. Vertical lines show records of the metrics with a text
    ``mark`` and a ``mark_kind``: something was decided there. If a run took more than one
    micro-batch in a step, a panel below shows their number.

    Raises:
        ArbError: a run has no step yet, or no number of this name, or the file cannot be written.
    """
    curves = [
        read_curves(run, read_metrics(run.metrics_file), index, metric)
        for index, run in enumerate(runs)
    ]
    figure = draw_curves(curves, metric)
    names = " and ".join(each.name for each in curves)
    title = names if len(runs) < 3 else f"{len(runs)} runs"
    figure.axes[0].set_title(title, fontsize=11)
    save_figure(figure, destination)


def draw_curves(
    curves: Sequence[RunCurves], metric: str, size: tuple[float, float] = (8.0, 5.0)
) -> Any:
    """Return the figure of :func:`plot_runs`, ``size`` in inches, without a title."""
    figure = new_figure(*size)
    if any(count != 1 for each in curves for _, count in each.draws):
        axes, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
        for each in curves:
            if each.draws:
                _draw_steps(lower, each.draws, each.colour)
        lower.set_ylabel("draws per step")
        lower.set_ylim(bottom=0)
    else:
        axes = lower = figure.add_subplot()

    several = len(curves) > 1
    for each in curves:
        _draw_curves(axes, each, several)
    draw_marks(
        axes,
        [(each.colour, each.marks) for each in curves],
        max(each.last_step for each in curves),
    )
    baselines: dict[str, float] = {}
    if metric == "loss":
        for each in curves:
            baselines |= _baselines(each.run)
    _draw_baselines(axes, baselines)

    lower.set_xlabel("optimizer step")
    axes.set_ylabel(_label([each.run for each in curves], metric))
    axes.set_ylim(top=_highest(curves, baselines) * 1.05)
    for each_axes in {axes, lower}:
        each_axes.grid(color="0.9", linewidth=0.6)
        each_axes.set_axisbelow(True)
        each_axes.spines[["top", "right"]].set_visible(False)
    axes.legend(edgecolor="none", framealpha=0.9, fontsize=9)
    return figure


def new_figure(width: float, height: float, dpi: int = 150) -> Any:
    """Return an empty figure of matplotlib, its size in inches."""
    # The object interface draws without a display and without global state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=dpi, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Any, path: Path) -> None:
    """Write ``figure`` to ``path``, whole or not at all; the suffix chooses PNG, SVG or PDF.

    Raises:
        ArbError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            figure.savefig(temporary, format=path.suffix.removeprefix(".") or "png")
    except (OSError, ValueError) as error:
        raise ArbError(f"{path}: the figure cannot be written: {error}") from error


# --- reading


def read_curves(
    run: RunDirectory, records: Sequence[dict[str, Any]], index: int, metric: str
) -> RunCurves:
    """Return what is drawn of the run number ``index``.

    Args:
        run: the run.
        records: the records of its metrics file.
        index: decides its colour.
        metric: name of the number.

    Raises:
        ArbError: it has no number called ``metric``.
    """
    train = _points(records, "train", metric)
    validation = _points(records, "validation", metric)
    if not train and not validation:
        raise _no_such_metric(metric, run, records)
    return RunCurves(
        run=run,
        colour=_COLOURS[index % len(_COLOURS)],
        train=train,
        validation=validation,
        draws=_points(records, "train", "draws"),
        marks=marks_in(records),
    )


def _points(records: Sequence[dict[str, Any]], event: str, key: str) -> Points:
    """Return step and ``key`` of each record of ``event``.

    A number that is not finite is a string in the file, and is left out.
    """
    points = []
    for record in records:
        value = record.get(key)
        if record.get("event") == event and isinstance(value, int | float):
            points.append((record["step"], value))
    return points


def _no_such_metric(metric: str, run: RunDirectory, records: Sequence[dict[str, Any]]) -> ArbError:
    """Return the error for a run without a number called ``metric``."""
    numbers = metric_names(records)
    if not numbers:
        return ArbError(f"{run.metrics_file}: no step has been taken yet; there is nothing to draw")
    return ArbError(
        f"{run.metrics_file}: there is no number {metric!r} in it",
        f"It has {', '.join(sorted(numbers))}.",
    )


def marks_in(records: Sequence[Mapping[str, Any]]) -> list[Mark]:
    """Return the marks in a metrics file: records, of any event, with a text ``mark``."""
    marks = []
    for record in records:
        text = record.get("mark")
        step = record.get("step")
        if isinstance(text, str) and isinstance(step, int):
            kind = record.get("mark_kind", record.get("event", "mark"))
            marks.append(Mark(step, text, str(kind)))
    return marks


def _baselines(run: RunDirectory) -> dict[str, float]:
    """Return what simple predictors reach, from the result of a finished run."""
    if not run.result_file.exists():
        return {}
    result = run.result()
    try:
        return {name.replace("_", " "): float(result[name]) for name in result["baselines"]}
    except (ValueError, KeyError, TypeError) as error:
        raise ArbError(f"{run.result_file}: the file is damaged: {error!r}") from error


def _label(runs: Sequence[RunDirectory], metric: str) -> str:
    """Return the label of the vertical axis."""
    if metric != "loss":
        return metric.replace("_", " ")
    units = {str(run.record().get("loss_unit", "nats per token")) for run in runs}
    return f"loss, {' or '.join(sorted(units))}"


# --- drawing


def _draw_curves(axes: Any, curves: RunCurves, several: bool) -> None:
    """Draw the metric of one run in training and in evaluations."""
    name = curves.name
    colour = curves.colour
    if curves.train:
        _draw_steps(axes, curves.train, colour, name if several else "training")
    if curves.validation:
        steps, values = zip(*curves.validation, strict=True)
        axes.plot(
            steps,
            values,
            color=colour,
            linestyle="none" if curves.train else "-",
            marker="o",
            markersize=5,
            markerfacecolor="white",
            label=f"{name}, validation" if several else "validation",
        )


def _highest(curves: Sequence[RunCurves], baselines: Mapping[str, float]) -> float:
    """Return the highest value that must be visible; single steps may be cut."""
    values = [*baselines.values()]
    for each in curves:
        values += [value for _, value in each.validation]
        if each.train:
            train = [value for _, value in each.train]
            values.append(max(smoothed(train, len(train) // 80)))
    return max(values)


def _draw_steps(axes: Any, points: Points, colour: str, label: str | None = None) -> None:
    """Draw a number of each step: thin as it is, thick smoothed."""
    steps, values = zip(*points, strict=True)
    axes.plot(steps, values, color=colour, linewidth=0.6, alpha=0.3)
    line = smoothed(values, len(values) // 80)
    axes.plot(steps, line, color=colour, linewidth=1.6, label=label)


def _draw_baselines(axes: Any, baselines: Mapping[str, float]) -> None:
    """Draw a horizontal line for each baseline, the highest one dashed."""
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


def draw_marks(axes: Any, runs: Sequence[tuple[str, Sequence[Mark]]], span: int) -> None:
    """Draw a thin vertical line for each mark, and one legend entry for each kind.

    The text of a mark stands along its line at the top.

    Args:
        axes: axes of matplotlib.
        runs: colour and marks of each run. Lines of several runs have these colours.
        span: steps that the figure shows.
    """
    single = len(runs) == 1
    kinds: dict[str, None] = {}
    labelled: list[int] = []
    for colour, marks in runs:
        for mark in sorted(marks, key=lambda each: each.step):
            kinds.setdefault(mark.kind)
            own_colour, style = _LOOKS.get(mark.kind, _OTHER_LOOK)
            shown = own_colour if single else colour
            axes.axvline(mark.step, color=shown, linestyle=style, linewidth=0.8, zorder=1.5)
            if any(abs(mark.step - other) < _CLOSEST * span for other in labelled):
                continue
            labelled.append(mark.step)
            text = mark.text if len(mark.text) <= _LONGEST else f"{mark.text[: _LONGEST - 1]}…"
            axes.annotate(
                text,
                (mark.step, 1.0),
                xycoords=("data", "axes fraction"),
                xytext=(-2, -2),
                textcoords="offset points",
                rotation=90,
                ha="right",
                va="top",
                fontsize=7,
                color=shown,
            )
    for kind in kinds:
        own_colour, style = _LOOKS.get(kind, _OTHER_LOOK)
        colour = own_colour if single else "0.35"
        axes.plot([], [], color=colour, linestyle=style, linewidth=0.8, label=kind)
