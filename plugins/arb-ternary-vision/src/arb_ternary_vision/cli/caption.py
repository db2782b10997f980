"""The generator ``caption``: write texts about files, or about held-out images of a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

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
    from torch import Tensor

    from arb_ternary_train.restore import TrainedRun


#: Most held-out images in the table and on the sheet.
_SHOWN: Final = 10


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("files", nargs=-1, type=click.Path(path_type=Path))
@click.option(
    "--count",
    type=click.IntRange(min=1),
    help="Number of held-out images to use if no FILES are named; default: all.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="Draw a sheet of the images (.png, .svg, .pdf).",
)
@invert_option
@load_options
def caption(
    run: Path,
    files: tuple[Path, ...],
    count: int | None,
    output: Path | None,
    invert: bool,
    backend: str | None,
    device: str | None,
) -> None:
    """Write a text about each of FILES with the model of RUN.

    RUN is a run directory or a checkpoint. Without FILES, texts are about held-out images of the
    run's data; the first ten are shown.
    """
    wait_passively()
    from arb_ternary_train.restore import load_run

    check_invert(invert, files)
    trained = load_run(run, backend=backend, device=device)
    correct: list[bool | None]
    if files:
        images = read_images(trained, files, invert).data
        texts = write_texts(trained, images)
        print_table(("image", "text"), list(zip(map(str, files), texts, strict=True)))
        shown = len(files)
        correct = [None] * shown
    else:
        images, expected = held_out_images(trained, count)
        texts = write_texts(trained, images)
        pairs = list(zip(texts, expected, strict=True))
        shown = min(_SHOWN, len(pairs))
        print_table(("written", "right"), pairs[:shown])
        correct = [text == right for text, right in pairs]
        exact = correct.count(True)
        click.echo(f"{exact} of {len(texts)} texts are exact ({exact / len(texts):.2%})")
    if output is not None:
        write_sheet(output, images[:shown], texts[:shown], correct[:shown])


def held_out_images(trained: TrainedRun, count: int | None) -> tuple[Tensor, list[str]]:
    """Return ``count`` held-out images ``[B, C, H, W]``, and the text of each; None = all.

    Raises:
        UsageProblem: the run's data has no texts.
    """
    import torch

    from arb_ternary_vision.data.source import LABELS

    captions = trained.directory.attachments().get("captions")
    if captions is None:
        raise UsageProblem(
            f"{trained.directory.path}: its data {trained.config.data.name!r} has no texts about "
            f"images"
        )
    batches = list(held_out_batches(trained, count))
    labels = torch.cat([batch.extras[LABELS] for batch in batches]).tolist()
    images = torch.cat([batch.data for batch in batches])
    return images, [captions[label] for label in labels]


def write_texts(trained: TrainedRun, images: Tensor) -> list[str]:
    """Return the text about each of ``images [B, C, H, W]``.

    Raises:
        UsageProblem: the model of the run does not write texts.
    """
    import torch

    from arb_ternary_text.data.tokenizers import from_json
    from arb_ternary_train.evaluate import evaluation_mode
    from arb_ternary_vision.data.captioned import END
    from arb_ternary_vision.models.captioner import Captioner

    model = trained.model
    attached = trained.directory.attachments()
    if not isinstance(model, Captioner) or "tokenizer" not in attached:
        raise UsageProblem(
            f"{trained.directory.path}: the model {trained.config.model.name!r} does not write "
            f"texts about images"
        )
    tokenizer = from_json(attached["tokenizer"])
    (end,) = tokenizer.encode(END)
    texts: list[str] = []
    with evaluation_mode(model):
        for chunk in torch.split(images, 64):
            ids = model.write(chunk.to(trained.device), end)
            texts += [tokenizer.decode(each) for each in ids]
    return texts
