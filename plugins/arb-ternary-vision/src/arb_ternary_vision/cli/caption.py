"""The generator ``caption``: texts about held-out images of a run, or about files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from arb_ternary.cli.options import plugin_files
from arb_ternary.cli.output import print_table
from arb_ternary.errors import UsageProblem
from arb_ternary_train.openmp import wait_passively

if TYPE_CHECKING:
    from torch import Tensor

    from arb_ternary_train.restore import TrainedRun


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("files", nargs=-1, type=click.Path(path_type=Path))
@click.option(
    "--count",
    type=click.IntRange(min=1),
    help="Held-out images, where no FILES are named; default: all of them.",
)
@click.option(
    "--show",
    type=click.IntRange(min=0),
    default=10,
    show_default=True,
    help="Held-out images in the table.",
)
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="A sheet of those (.png, .svg, .pdf)."
)
@click.option(
    "--temperature",
    type=click.FloatRange(min=0.0),
    default=0.0,
    show_default=True,
    help="0 = the likeliest.",
)
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the draws."
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
def caption(
    run: Path,
    files: tuple[Path, ...],
    count: int | None,
    show: int,
    output: Path | None,
    temperature: float,
    seed: int,
    invert: bool,
    backend: str | None,
    device: str | None,
) -> None:
    """Write a text about each of FILES, or of the held-out images of the data of RUN, with its
    model.
    """
    wait_passively()
    from arb_ternary_train.restore import load_run
    from arb_ternary_vision.cli.classify import images_in

    if invert and not files:
        raise UsageProblem(
            "--invert: held-out images are as the model knows them", "Name files, or leave it out."
        )
    trained = load_run(run, backend=backend, device=device)
    images, wanted = (
        (images_in(trained, files, invert).data, []) if files else held_out_images(trained, count)
    )
    texts = written(trained, images, temperature=temperature, seed=seed)
    if files:
        print_table(
            ("image", "text"), [(str(file), text) for file, text in zip(files, texts, strict=True)]
        )
    else:
        shown = list(zip(texts, wanted, strict=True))[:show]
        if shown:
            print_table(("written", "right"), shown)
        right = sum(text == other for text, other in zip(texts, wanted, strict=True))
        click.echo(f"{right} of {len(texts)} texts are exact ({right / len(texts):.2%})")
    if output is not None:
        _draw(images, texts, wanted, len(texts) if files else show, output)
        click.echo(output)


def held_out_images(trained: TrainedRun, count: int | None) -> tuple[Tensor, list[str]]:
    """Held-out images ``[B, C, H, W]``, and the text of each: ``count`` of them spread over all;
    None: all.

    Raises:
        UsageProblem: the run's data has no texts.
    """
    import torch

    from arb_ternary_vision.data.captioned import CaptionedSource
    from arb_ternary_vision.data.source import LABELS

    data = trained.config.data.build()
    if not isinstance(data, CaptionedSource):
        raise UsageProblem(
            f"{trained.directory.path}: its data {trained.config.data.name!r} has no texts of "
            f"images"
        )
    batches = list(data.held_out(64, 1, None) if count is None else data.held_out(count, 1, 1))
    labels = torch.cat([batch.extras[LABELS] for batch in batches]).tolist()
    return torch.cat([batch.data for batch in batches]), [data.captions[label] for label in labels]


def written(trained: TrainedRun, images: Tensor, *, temperature: float, seed: int) -> list[str]:
    """The text about each of ``images [B, C, H, W]``; UsageProblem: the run's model writes
    nothing.
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
            f"{trained.directory.path}: the model {trained.config.model.name!r} writes nothing"
        )
    tokenizer = from_json(attached["tokenizer"])
    (end,) = tokenizer.encode(END)
    texts: list[str] = []
    with evaluation_mode(model):
        for number, some in enumerate(torch.split(images, 64)):
            ids = model.write(
                some.to(trained.device), end, temperature=temperature, seed=seed + number
            )
            texts += [tokenizer.decode(each) for each in ids]
    return texts


def _draw(images: Tensor, texts: list[str], wanted: list[str], count: int, output: Path) -> None:
    from arb_ternary_vision.pictures import draw_sheet, save_figure

    right = (
        [text == other for text, other in zip(texts, wanted, strict=True)]
        if wanted
        else [None] * len(texts)
    )
    if not count:
        raise UsageProblem(f"{output}: there is no image to draw", "--show says how many.")
    save_figure(
        draw_sheet(images[:count].numpy(), texts[:count], right[:count], "what the model writes"),
        output,
    )
