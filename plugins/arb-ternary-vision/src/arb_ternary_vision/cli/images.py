"""Read images of a run and draw sheets of them, for the commands of this package."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from arb_ternary.errors import UsageProblem

if TYPE_CHECKING:
    from torch import Tensor

    from arb_ternary.config.choice import DataChoice
    from arb_ternary.protocols.data import Batch
    from arb_ternary_train.restore import TrainedRun

invert_option = click.option(
    "--invert",
    is_flag=True,
    help="Exchange black and white in FILES; digits are light strokes on black.",
)


def check_invert(invert: bool, files: tuple[Path, ...]) -> None:
    """Check that ``--invert`` is used with files only.

    Raises:
        UsageProblem: it is used with held-out images.
    """
    if invert and not files:
        raise UsageProblem(
            "--invert: held-out images are already as in training",
            "Name files, or leave out --invert.",
        )


def read_images(trained: TrainedRun, files: tuple[Path, ...], invert: bool) -> Batch:
    """Read ``files`` as images of the size that the run's data has; their labels are 0.

    Transparent pixels get the background of the run's data, or white.

    Raises:
        UsageProblem: the run's data has no images.
        DataError: a file cannot be read.
    """
    import numpy as np
    import torch

    from arb_ternary.protocols.data import Batch
    from arb_ternary_vision.data.decode import MAX_PIXELS, decode_image
    from arb_ternary_vision.data.source import LABELS

    attached = trained.directory.attachments()
    if "image_shape" not in attached:
        raise UsageProblem(
            f"{trained.directory.path}: its data {trained.config.data.name!r} has no image size",
            "Leave out the files to use held-out samples of the data.",
        )
    channels, height, width = attached["image_shape"]
    background = _background(trained.config.data)
    images = [
        decode_image(
            file,
            (height, width),
            channels,
            fit="crop",
            max_pixels=MAX_PIXELS,
            background=background,
        )
        for file in files
    ]
    data = torch.from_numpy(np.stack(images)).float().div_(127.5).sub_(1)
    labels = torch.zeros(len(files), dtype=torch.int64)
    return Batch(-data if invert else data, torch.arange(len(files)), {LABELS: labels})


def _background(data: DataChoice) -> str:
    """Return the colour behind transparent pixels of a run's images."""
    from arb_ternary_vision.data.captioned import CaptionedConfig
    from arb_ternary_vision.data.decode import BACKGROUND
    from arb_ternary_vision.data.image_folder import ImagesConfig

    options = data.options
    if isinstance(options, CaptionedConfig):
        options = options.images.options
    return options.background if isinstance(options, ImagesConfig) else BACKGROUND


def held_out_batches(trained: TrainedRun, count: int | None) -> Iterator[Batch]:
    """Yield ``count`` held-out samples of the run's data, spread evenly; None = all."""
    from arb_ternary.protocols.data import DataSource
    from arb_ternary_train.build import require_protocol

    choice = trained.config.data
    data: DataSource = require_protocol(choice.build(), DataSource, choice)
    return data.held_out(64, 1, None) if count is None else data.held_out(count, 1, 1)


def write_sheet(
    output: Path, images: Tensor, captions: Sequence[str], correct: Sequence[bool | None]
) -> None:
    """Draw images ``[N, C, H, W]`` with their captions into a file, and print its name."""
    from arb_ternary_train.plot import save_figure
    from arb_ternary_vision.figures import draw_sheet

    title = f"predictions for {len(captions)} images"
    save_figure(draw_sheet(images.numpy(), captions, correct, title), output)
    click.echo(output)
