"""``arb diffusion frechet``: measure how far the images of a model are from real ones."""

from __future__ import annotations

from pathlib import Path

import click

from arb_ternary_train.cli.options import load_options
from arb_ternary_train.openmp import wait_passively


@click.group()
def diffusion() -> None:
    """Measure what a diffusion model draws."""


@diffusion.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--classifier",
    type=click.Path(path_type=Path),
    help="Run of a classifier: compare the input of its head too, besides pixels.",
)
@click.option(
    "--steps",
    type=click.IntRange(1, 10_000),
    default=50,
    show_default=True,
    help="Evaluations of the model per image.",
)
@click.option(
    "--guidance", type=float, default=1.0, show_default=True, help="As for `arb generate`."
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Seed of the noise that images are drawn from.",
)
@load_options
def frechet(
    run: Path,
    classifier: Path | None,
    steps: int,
    guidance: float,
    seed: int,
    backend: str | None,
    device: str | None,
) -> None:
    """Print the Frechet distance of images of RUN's model to its training images.

    As many images are drawn as are held out, of the same classes. Smaller is better. The distance
    of the held-out images, which images as good as real ones reach, is printed too.
    """
    wait_passively()
    import torch

    from arb_ternary_diffusion.fidelity import (
        Features,
        classifier_features,
        compare_images,
        pixels,
        read_real_images,
    )
    from arb_ternary_diffusion.images import Sampling, cycle_labels, draw_images, require_denoiser
    from arb_ternary_train.restore import load_run

    trained = load_run(run, backend=backend, device=device)
    denoiser = require_denoiser(str(run), trained.config.masking, trained.model)
    compared: dict[str, Features] = {"pixels": pixels}
    if classifier is not None:
        judge = load_run(classifier, backend=backend, device=device)
        features = classifier_features(str(classifier), judge.model, judge.device)
        compared[f"features of {classifier.name}"] = features
    real = read_real_images(trained.config.data.build())
    labels_N = real.held_out_labels
    if labels_N is None:
        labels_N = cycle_labels(len(real.held_out), denoiser.model.classes)
    drawn_NCHW = draw_images(
        denoiser,
        labels_N,
        Sampling(steps=steps, guidance=guidance),
        generator=torch.Generator().manual_seed(seed),
        device=trained.device,
    )
    for name, features in compared.items():
        found = compare_images(drawn_NCHW, real, features)
        click.echo(
            f"{name}: {found.drawn:.3f} drawn, {found.held_out:.3f} held out ({found.images} "
            f"images each)"
        )
