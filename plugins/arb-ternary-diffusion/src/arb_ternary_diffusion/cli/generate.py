"""The generator of pictures: ``arb generate RUN --output samples.png`` for a model that learned to
take noise away.
"""

from __future__ import annotations

from pathlib import Path

import click

from arb_ternary.cli.options import plugin_files
from arb_ternary_train.openmp import wait_passively


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("samples.png"),
    show_default=True,
    help="The PNG.",
)
@click.option(
    "--count",
    type=click.IntRange(min=1),
    default=100,
    show_default=True,
    help="Pictures, in a square.",
)
@click.option(
    "--label", help="Class of all pictures, by name or number; default: all classes in turn."
)
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    default=50,
    show_default=True,
    help="Passes through the model.",
)
@click.option("--sampler", type=click.Choice(["ddim", "ddpm"]), default="ddim", show_default=True)
@click.option(
    "--eta",
    type=click.FloatRange(min=0.0),
    default=0.0,
    show_default=True,
    help="Noise that ddim adds on the way: 0 = none, 1 = as much as ddpm.",
)
@click.option(
    "--guidance",
    type=float,
    default=1.0,
    show_default=True,
    help="Beyond 1, pictures are led towards their class and away from any; twice the time.",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    help="The same seed gives the same pictures; default: others.",
)
@click.option(
    "--backend",
    metavar="NAME",
    help="Kernel backend, over ARB_TERNARY_BACKEND and the run's config.",
)
@click.option("--device", help="cpu, cuda, cuda:N or mps; default: the run's own.")
@plugin_files
def draw(
    run: Path,
    output: Path,
    count: int,
    label: str | None,
    steps: int,
    sampler: str,
    eta: float,
    guidance: float,
    seed: int | None,
    backend: str | None,
    device: str | None,
) -> None:
    """Draw pictures with the model of RUN (a run directory or a checkpoint), all in one PNG."""
    wait_passively()
    import torch

    from arb_ternary.errors import UsageProblem
    from arb_ternary_diffusion.pictures import (
        Sampling,
        class_names,
        denoiser_of,
        draw_pictures,
        labels_of,
        write_grid,
    )
    from arb_ternary_train.restore import load_run

    if eta and sampler != "ddim":
        raise UsageProblem(
            "--eta: ddpm adds what noise it adds; take it out, or use --sampler ddim"
        )
    if output.suffix.lower() != ".png":
        raise UsageProblem(f"--output {output}: pictures are written as .png")
    sampling = Sampling(steps=steps, sampler=sampler, eta=eta, guidance=guidance)  # type: ignore[arg-type]
    trained = load_run(run, backend=backend, device=device)
    denoiser = denoiser_of(str(run), trained.config.masking, trained.model)
    labels_N = labels_of(
        label, count, denoiser.classes, class_names(trained.directory.attachments())
    )
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    pictures = draw_pictures(
        denoiser,
        labels_N,
        sampling,
        generator=generator,
        device=trained.device,
    )
    try:
        write_grid(output, pictures)
    except OSError as error:
        raise UsageProblem(
            f"--output {output}: cannot be written: {error.strerror or error}"
        ) from error
    click.echo(f"{output}: {count} pictures")
