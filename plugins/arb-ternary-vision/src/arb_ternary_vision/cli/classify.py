"""The generator ``classify``: what a classifier says of images, as lines and as a sheet."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from arb_ternary.cli.options import plugin_files
from arb_ternary.cli.output import print_table
from arb_ternary.errors import UsageProblem
from arb_ternary_train.openmp import wait_passively

if TYPE_CHECKING:
    from collections.abc import Iterable

    from arb_ternary.protocols.data import Batch
    from arb_ternary_train.restore import TrainedRun
    from arb_ternary_vision.predictions import Predictions


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("files", nargs=-1, type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="A sheet of the images (.png, .svg, .pdf).",
)
@click.option(
    "--count",
    type=click.IntRange(min=1),
    default=40,
    show_default=True,
    help="Held-out images that are shown, where no FILES are named.",
)
@click.option(
    "--wrong",
    is_flag=True,
    help="Ask about all held-out images, and show those taken for another class.",
)
@click.option(
    "--invert",
    is_flag=True,
    help="Exchange black and white in FILES; digits are light strokes on black.",
)
@click.option(
    "--backend",
    metavar="NAME",
    help="Kernel backend, over ARB_TERNARY_BACKEND and the run's config.",
)
@click.option("--device", help="cpu, cuda, cuda:N or mps; default: the run's own.")
@plugin_files
def classify(
    run: Path,
    files: tuple[Path, ...],
    output: Path | None,
    count: int,
    wrong: bool,
    invert: bool,
    backend: str | None,
    device: str | None,
) -> None:
    """Say what the model of RUN (a run directory or a checkpoint) sees in FILES, or in held-out
    images of its data.
    """
    wait_passively()
    from arb_ternary_train.restore import load_run
    from arb_ternary_vision.predictions import class_names

    if files and wrong:
        raise UsageProblem(
            "--wrong: nobody has told what is in the files", "Leave out the files, or --wrong."
        )
    if invert and not files:
        raise UsageProblem(
            "--invert: held-out images are as the model knows them", "Name files, or leave it out."
        )
    trained = load_run(run, backend=backend, device=device)
    found = (
        _answers(trained, [images_in(trained, files, invert)])
        if files
        else _of_held_out(trained, None if wrong else count)
    )
    names = class_names(trained.directory.attachments(), found.probabilities.shape[1])
    if files:
        rows = [
            (str(file), names[place], f"{shares[place]:.3f}")
            for file, place, shares in zip(files, found.classes, found.probabilities, strict=True)
        ]
        print_table(("image", "class", "probability"), rows)
    else:
        right = int((found.classes == found.labels).sum())
        click.echo(f"{right} of {len(found.labels)} held-out images are right")
    if wrong:
        missed = found.classes != found.labels
        found = found.where(missed & (missed.cumsum() <= count))
    if output is not None:
        if not len(found.labels):
            raise UsageProblem(f"{output}: there is no wrong image to draw", "Leave out --wrong.")
        _draw(found, names, output, known=not files)
        click.echo(output)


def _of_held_out(trained: TrainedRun, count: int | None) -> Predictions:
    """Answers about ``count`` held-out images, spread over all of them; None: about all."""
    from arb_ternary.protocols.data import DataSource
    from arb_ternary_train.build import require_protocol

    choice = trained.config.data
    data: DataSource = require_protocol(choice.build(), DataSource, choice)
    batches = data.held_out(16, 1, None) if count is None else data.held_out(count, 1, 1)
    return _answers(trained, batches)


def images_in(trained: TrainedRun, files: tuple[Path, ...], invert: bool) -> Batch:
    """``files`` as the model of a run reads images; their labels are not known, and 0.

    Raises:
        UsageProblem: the run's data has no images.
        DataError: a file cannot be read.
    """
    import numpy as np
    import torch

    from arb_ternary.protocols.data import Batch
    from arb_ternary_vision.data.folder import MAX_PIXELS, decoded
    from arb_ternary_vision.data.source import LABELS

    attached = trained.directory.attachments()
    if "image_shape" not in attached:
        raise UsageProblem(
            f"{trained.directory.path}: its data {trained.config.data.name!r} has no size of "
            f"images",
            "Leave out the files: held-out samples of the data are classified.",
        )
    channels, height, width = attached["image_shape"]
    images = [
        decoded(file, (height, width), channels, fit="crop", max_pixels=MAX_PIXELS)
        for file in files
    ]
    data = torch.from_numpy(np.stack(images)).float().div_(127.5).sub_(1)
    unknown = torch.zeros(len(files), dtype=torch.int64)
    return Batch(-data if invert else data, torch.arange(len(files)), {LABELS: unknown})


def _answers(trained: TrainedRun, batches: Iterable[Batch]) -> Predictions:
    from arb_ternary.protocols.data import MaskingStrategy
    from arb_ternary_train.build import require_protocol
    from arb_ternary_vision.predictions import classify_batches

    choice = trained.config.masking
    masking: MaskingStrategy = require_protocol(choice.build(), MaskingStrategy, choice)
    return classify_batches(
        trained.model,
        batches,
        masking,
        vocabulary_size=int(trained.record["vocabulary_size"]),
        seed=trained.config.seed,
        step=trained.checkpoint.step,
        device=trained.device,
    )


def _draw(found: Predictions, names: tuple[str, ...], output: Path, *, known: bool) -> None:
    from arb_ternary_vision.pictures import draw_sheet, save_figure

    captions = []
    right = []
    for said, label in zip(found.classes, found.labels, strict=True):
        right.append(bool(said == label) if known else None)
        captions.append(f"{names[said]}, not {names[label]}" if right[-1] is False else names[said])
    save_figure(
        draw_sheet(
            found.inputs.numpy(), captions, right, f"what the model says: {len(captions)} images"
        ),
        output,
    )
