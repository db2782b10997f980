"""Figures of a classifier: a confusion matrix, and a sheet of images with predicted classes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from arb_ternary_train.plot import new_figure
from arb_ternary_vision.pixels import to_bytes

#: Most classes for which each cell shows its number.
_MAX_NUMBERS: Final = 25
#: Most names of classes on an axis.
_MAX_NAMES: Final = 60
#: Colours of right and wrong captions, and of captions that may be either. Colour-blind readers can
#: tell them apart (Okabe and Ito, 2008).
_COLOURS: Final = {True: "#0072B2", False: "#D55E00", None: "black"}


def draw_confusion(counts: NDArray[np.int64], classes: Sequence[str], title: str) -> Figure:
    """Draw a confusion matrix: rows are the right classes, columns the predicted ones.

    The shade of a cell is its share of the row. On the right is the recall of each class, the share
    of its samples that are predicted right.
    """
    size = len(classes)
    totals = counts.sum(axis=1)
    shares = counts / np.maximum(totals, 1)[:, None]
    side = min(12.0, 2.4 + 0.42 * size)
    figure: Figure = new_figure(side + 0.6, side, dpi=110)
    axes = figure.add_subplot()
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    if size <= _MAX_NUMBERS:
        _write_numbers(axes, counts, shares)

    shown = range(0, size, -(-size // _MAX_NAMES))
    names = [classes[index] for index in shown]
    horizontal = max(map(len, classes)) <= 2
    axes.set_xticks(shown, names, rotation=0 if horizontal else 90, fontsize=8)
    axes.set_yticks(shown, names, fontsize=8)
    right = axes.secondary_yaxis("right")
    recalls = [
        f"{100 * shares[index, index]:.0f} %" if totals[index] else "none" for index in shown
    ]
    right.set_yticks(list(shown), recalls, fontsize=8)
    right.tick_params(length=0)
    right.set_ylabel("recall", fontsize=9)
    axes.set_xlabel("predicted", fontsize=9)
    axes.set_ylabel("true", fontsize=9)
    axes.set_title(title, fontsize=10)
    return figure


def _write_numbers(axes: Axes, counts: NDArray[np.int64], shares: NDArray[np.float64]) -> None:
    for row, column in np.argwhere(counts > 0).tolist():
        axes.text(
            column,
            row,
            str(counts[row, column]),
            ha="center",
            va="center",
            color="white" if shares[row, column] > 0.5 else "black",
            fontsize=8,
        )


def draw_sheet(
    images: NDArray[np.float32],
    captions: Sequence[str],
    correct: Sequence[bool | None],
    title: str,
    columns: int = 10,
) -> Figure:
    """Draw images in rows, each with its caption above.

    Args:
        images: ``[N, C, H, W]`` in [-1, 1].
        captions: text of each image.
        correct: whether each caption is right (blue) or wrong (orange); None = not known (black).
        title: title of the figure.
        columns: most images per row.
    """
    columns = min(columns, len(images))
    rows = math.ceil(len(images) / columns)
    figure: Figure = new_figure(0.3 + 0.85 * columns, 0.5 + 1.1 * rows, dpi=110)
    cells = zip(images, captions, correct, strict=True)
    for number, (image, caption, right) in enumerate(cells, 1):
        axes = figure.add_subplot(rows, columns, number)
        axes.imshow(to_bytes(image), cmap="gray", vmin=0, vmax=255, interpolation="nearest")
        axes.set_title(caption, fontsize=8, color=_COLOURS[right], pad=2)
        axes.set_axis_off()
    figure.suptitle(title, fontsize=10)
    return figure
