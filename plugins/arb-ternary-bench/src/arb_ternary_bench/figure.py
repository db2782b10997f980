"""Common parts of all figures: colours, a canvas without a display, grids, and writing the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from arb_ternary.errors import ArbError

#: Categorical colours that colour-blind readers can tell apart (Okabe and Ito, 2008).
COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


def new_figure(width: float, height: float) -> Any:
    """Make an empty figure, in inches."""
    # The object interface draws without a display and without global state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def dress(axes: Any) -> None:
    """Give a panel a light grid and take two of its edges away."""
    axes.grid(color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def save(figure: Any, destination: Path) -> None:
    """Write a figure to a file.

    Raises:
        ArbError: the file cannot be written.
    """
    try:
        figure.savefig(destination)
    except (OSError, ValueError) as error:
        raise ArbError(f"{destination}: the figure cannot be written: {error}") from error
