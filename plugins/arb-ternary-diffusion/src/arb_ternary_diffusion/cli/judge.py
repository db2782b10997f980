"""``arb diffusion frechet``: how far the pictures of a run are from real ones."""

from __future__ import annotations

from pathlib import Path

import click

from arb_ternary.cli.options import plugin_files
from arb_ternary_train.openmp import wait_passively


@click.group()
def diffusion() -> None:
    """Judge what a diffusion model draws."""


@diffusion.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--classifier",
    type=click.Path(path_type=Path),
    help="Compare what enters the head of this run's classifier too, not only pixels.",
)
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    default=50,
    show_default=True,
    help="Passes through the model.",
)
@click.option(
    "--guidance", type=float, default=1.0, show_default=True, help="As of `arb generate`."
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option(
    "--backend",
    metavar="NAME",
    help="Kernel backend, over ARB_TERNARY_BACKEND and the run's config.",
)
@click.option("--device", help="cpu, cuda, cuda:N or mps; default: the run's own.")
@plugin_files
def frechet(
    run: Path,
    classifier: Path | None,
    steps: int,
    guidance: float,
    seed: int,
    backend: str | None,
    device: str | None,
) -> None:
    """Frechet distance of pictures of RUN's model to its training pictures, beside that of the
    held-out pictures.

    As many are drawn as are held out, of the same classes. Smaller is better; that of the held-out
    ones is what pictures reach that are as good as real.
    """
    wait_passively()
    import torch

    from arb_ternary_diffusion.judging import (
        Features,
        distances,
        features_of,
        pixels,
        real_pictures,
    )
    from arb_ternary_diffusion.pictures import Sampling, denoiser_of, draw_pictures, labels_of
    from arb_ternary_train.restore import load_run

    trained = load_run(run, backend=backend, device=device)
    denoiser = denoiser_of(str(run), trained.config.masking, trained.model)
    compared: dict[str, Features] = {"pixels": pixels}
    if classifier is not None:
        judge = load_run(classifier, backend=backend, device=device)
        compared[f"features of {classifier.name}"] = features_of(
            str(classifier), judge.model, judge.device
        )
    real = real_pictures(trained.config.data.build())
    labels_N = real.held_out_labels
    drawn_NCHW = draw_pictures(
        denoiser,
        labels_of(None, len(real.held_out), denoiser.classes, None)
        if labels_N is None
        else labels_N,
        Sampling(steps=steps, guidance=guidance),
        generator=torch.Generator().manual_seed(seed),
        device=trained.device,
    )
    for name, features in compared.items():
        found = distances(drawn_NCHW, real, features)
        click.echo(
            f"{name}: {found.drawn:.3f} drawn, {found.held_out:.3f} held out ({found.pictures} "
            f"pictures each)"
        )
