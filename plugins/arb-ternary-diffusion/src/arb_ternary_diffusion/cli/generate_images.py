"""The generator ``image_diffusion``: draw images with a model that removes noise."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from arb_ternary.errors import UsageProblem
from arb_ternary_train.cli.options import load_options
from arb_ternary_train.openmp import wait_passively

if TYPE_CHECKING:
    from arb_ternary_diffusion.samplers import SamplerName


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("samples.png"),
    show_default=True,
    help="The PNG to write.",
)
@click.option(
    "--count",
    type=click.IntRange(1, 10_000),
    default=100,
    show_default=True,
    help="Number of images, arranged in a square.",
)
@click.option(
    "--label", help="Class of all images, by name or number; default: all classes in turn."
)
@click.option(
    "--steps",
    type=click.IntRange(1, 10_000),
    default=50,
    show_default=True,
    help="Evaluations of the model per image.",
)
@click.option("--sampler", type=click.Choice(["ddim", "ddpm"]), default="ddim", show_default=True)
@click.option(
    "--eta",
    type=click.FloatRange(min=0.0),
    default=0.0,
    show_default=True,
    help="Noise that ddim adds in each step: 0 = none, 1 = as much as ddpm.",
)
@click.option(
    "--guidance",
    type=float,
    default=1.0,
    show_default=True,
    help="Above 1, images are more typical of their class, and take twice the time.",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    help="The same seed gives the same images; default: different ones each time.",
)
@load_options
def draw(
    run: Path,
    output: Path,
    count: int,
    label: str | None,
    steps: int,
    sampler: SamplerName,
    eta: float,
    guidance: float,
    seed: int | None,
    backend: str | None,
    device: str | None,
) -> None:
    """Draw images with the model of RUN, a run directory or a checkpoint, into one PNG."""
    wait_passively()
    import torch

    from arb_ternary_diffusion.images import (
        Sampling,
        cycle_labels,
        draw_images,
        find_label,
        require_denoiser,
        write_grid,
    )
    from arb_ternary_text.models.generate import seeded_generator
    from arb_ternary_train.restore import load_run
    from arb_ternary_vision.predictions import class_names

    if eta and sampler != "ddim":
        raise UsageProblem(
            "--eta: ddpm has a fixed amount of noise; leave it out, or use --sampler ddim"
        )
    if output.suffix.lower() != ".png":
        raise UsageProblem(f"--output {output}: images are written as .png")
    sampling = Sampling(steps=steps, sampler=sampler, eta=eta, guidance=guidance)
    trained = load_run(run, backend=backend, device=device)
    denoiser = require_denoiser(str(run), trained.config.masking, trained.model)
    classes = denoiser.model.classes
    labels_N = cycle_labels(count, classes)
    if label is not None:
        names = class_names(trained.directory.attachments(), classes)
        labels_N = torch.full((count,), find_label(label, names))
    images = draw_images(
        denoiser, labels_N, sampling, generator=seeded_generator(seed), device=trained.device
    )
    try:
        write_grid(output, images)
    except OSError as error:
        raise UsageProblem(
            f"--output {output}: cannot be written: {error.strerror or error}"
        ) from error
    click.echo(f"{output}: {count} images")
