"""Figures of a classifier: a confusion matrix, and a sheet of images with what it says of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray

from arb_ternary.errors import ArbError
from arb_ternary_train.durable import replacing

#: Most classes whose cells hold their number, and whose names are written out.
_MOST_NUMBERS: Final = 25
_MOST_NAMES: Final = 60
#: Right and wrong, apart for colour-blind readers (Okabe and Ito, 2008).
_RIGHT = "#0072B2"
_WRONG = "#D55E00"


def draw_confusion(counts: NDArray[np.int64], classes: Sequence[str], title: str) -> Figure:
    """A confusion matrix: rows are the right classes, columns the predicted ones, the shade is the
    share of the row.

    Behind each row stands its recall: the share of the class that was recognised.
    """
    size = len(classes)
    totals = counts.sum(axis=1)
    shares = counts / np.maximum(totals, 1)[:, None]
    side = min(12.0, 2.4 + 0.42 * size)
    figure = _figure(side + 0.6, side)
    axes = figure.add_subplot()
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    if size <= _MOST_NUMBERS:
        for row, column in np.argwhere(counts > 0).tolist():
            colour = "white" if shares[row, column] > 0.5 else "black"
            axes.text(
                column,
                row,
                str(counts[row, column]),
                ha="center",
                va="center",
                color=colour,
                fontsize=8,
            )
    step = -(-size // _MOST_NAMES)
    named = range(0, size, step)
    upright = max(map(len, classes)) <= 2
    axes.set_xticks(
        named, [classes[index] for index in named], rotation=0 if upright else 90, fontsize=8
    )
    axes.set_yticks(named, [classes[index] for index in named], fontsize=8)
    right = axes.secondary_yaxis("right")
    recalls = [
        f"{100 * shares[index, index]:.0f} %" if totals[index] else "none" for index in named
    ]
    right.set_yticks(list(named), recalls, fontsize=8)
    right.tick_params(length=0)
    right.set_ylabel("recall", fontsize=9)
    axes.set_xlabel("predicted", fontsize=9)
    axes.set_ylabel("true", fontsize=9)
    axes.set_title(title, fontsize=10)
    return figure


def draw_sheet(
    images: NDArray[np.float32],
    captions: Sequence[str],
    right: Sequence[bool | None],
    title: str,
    columns: int = 10,
) -> Figure:
    """Images ``[N, C, H, W]`` in [-1, 1] in rows, each with its caption above: blue if right,
    orange if wrong.

    None among ``right``: nobody knows; the caption is black.
    """
    columns = min(columns, len(images))
    rows = math.ceil(len(images) / columns)
    figure = _figure(0.3 + 0.85 * columns, 0.5 + 1.1 * rows)
    for place, (image, caption, known) in enumerate(zip(images, captions, right, strict=True), 1):
        axes = figure.add_subplot(rows, columns, place)
        axes.imshow(as_shown(image), cmap="gray", vmin=0, vmax=255, interpolation="nearest")
        colour = "black" if known is None else _RIGHT if known else _WRONG
        axes.set_title(caption, fontsize=8, color=colour, pad=2)
        axes.set_axis_off()
    figure.suptitle(title, fontsize=10)
    return figure


def as_shown(image: NDArray[np.float32]) -> NDArray[np.uint8]:
    """``[C, H, W]`` in [-1, 1] as bytes: ``[H, W]``, or ``[H, W, 3]`` of three channels.

    Raises:
        ArbError: it has neither one channel nor three.
    """
    pixels = np.clip(np.rint((image + 1) * 127.5), 0, 255).astype(np.uint8)
    if len(pixels) not in (1, 3):
        raise ArbError(
            f"images of {len(pixels)} channels cannot be drawn: 1 is grey, 3 are red, green and "
            f"blue"
        )
    return pixels[0] if len(pixels) == 1 else np.ascontiguousarray(pixels.transpose(1, 2, 0))


def save_figure(figure: Figure, path: Path) -> None:
    """Write ``figure`` to ``path``, whole or not at all; its ending chooses the format (PNG, SVG,
    PDF).

    Raises:
        ArbError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            figure.savefig(temporary, format=path.suffix.removeprefix(".") or "png")
    except (OSError, ValueError) as error:
        raise ArbError(f"{path}: the picture cannot be written: {error}") from error


def _figure(width: float, height: float) -> Figure:
    # The object interface draws without a display and without global state.
    figure = Figure(figsize=(width, height), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    return figure
