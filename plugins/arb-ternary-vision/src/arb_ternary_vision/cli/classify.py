"""The generator ``classify``: print the classes of images, and draw a sheet of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from arb_ternary.cli.output import print_table
from arb_ternary.errors import UsageProblem
from arb_ternary_train.cli.options import load_options
from arb_ternary_train.openmp import wait_passively
from arb_ternary_vision.cli.images import (
    check_invert,
    held_out_batches,
    invert_option,
    read_images,
    write_sheet,
)

if TYPE_CHECKING:
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
    help="Draw a sheet of the images (.png, .svg, .pdf).",
)
@click.option(
    "--count",
    type=click.IntRange(min=1),
    default=40,
    show_default=True,
    help="Number of held-out images to use if no FILES are named.",
)
@click.option(
    "--wrong",
    is_flag=True,
    help="Classify all held-out images, and draw those that are predicted wrong.",
)
@invert_option
@load_options
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
    """Classify FILES with the model of RUN, a run directory or a checkpoint.

    Without FILES, held-out images of the run's data are classified.
    """
    wait_passively()
    from arb_ternary_train.restore import load_run
    from arb_ternary_vision.predictions import class_names

    if files and wrong:
        raise UsageProblem(
            "--wrong: the classes of the files are not known", "Leave out the files, or --wrong."
        )
    check_invert(invert, files)
    trained = load_run(run, backend=backend, device=device)
    if files:
        predictions = classify_run(trained, [read_images(trained, files, invert)])
    else:
        predictions = classify_run(trained, held_out_batches(trained, None if wrong else count))
    names = class_names(trained.directory.attachments(), predictions.probabilities.shape[1])
    if files:
        print_classes("image", files, predictions, names)
    else:
        right = int(predictions.correct.sum())
        click.echo(f"{right} of {len(predictions.labels)} held-out images are right")
    if wrong:
        missed = ~predictions.correct
        predictions = predictions.take(missed & (missed.cumsum() <= count))
    if output is not None:
        _draw(predictions, names, output, known=not files)


def classify_run(trained: TrainedRun, batches: Iterable[Batch]) -> Predictions:
    """Classify samples with the model of a run.

    Raises:
        ArbError: the run does not predict one class per sample, or there is no sample.
    """
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


def print_classes(
    noun: str, files: Sequence[Path], predictions: Predictions, names: Sequence[str]
) -> None:
    """Print a table of the most likely class of each file and its probability."""
    rows = [
        (str(file), names[index], f"{probabilities[index]:.3f}")
        for file, index, probabilities in zip(
            files, predictions.classes, predictions.probabilities, strict=True
        )
    ]
    print_table((noun, "class", "probability"), rows)


def _draw(predictions: Predictions, names: Sequence[str], output: Path, *, known: bool) -> None:
    if not len(predictions.labels):
        raise UsageProblem(f"{output}: there is no wrong image to draw", "Leave out --wrong.")
    captions = []
    correct: list[bool | None] = []
    for predicted, label in zip(predictions.classes, predictions.labels, strict=True):
        right = bool(predicted == label) if known else None
        correct.append(right)
        caption = names[predicted]
        captions.append(f"{caption}, not {names[label]}" if right is False else caption)
    write_sheet(output, predictions.inputs, captions, correct)
