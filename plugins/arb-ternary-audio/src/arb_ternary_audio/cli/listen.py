"""The generator ``listen``: print how a sound classifier classifies sound files."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import click

from arb_ternary.cli.options import plugin_files
from arb_ternary.cli.output import print_table
from arb_ternary.errors import UsageProblem
from arb_ternary_train.openmp import wait_passively


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("files", nargs=-1, type=click.Path(path_type=Path))
@click.option(
    "--longer",
    type=click.Choice(["error", "cut"]),
    default="error",
    show_default=True,
    help="What to do with a sound that is longer than the model's input: an error, or use its "
    "beginning.",
)
@click.option(
    "--backend",
    metavar="NAME",
    help="Kernel backend, over ARB_TERNARY_BACKEND and the run's config.",
)
@click.option("--device", help="cpu, cuda, cuda:N or mps; default: the run's own.")
@plugin_files
def listen(
    run: Path,
    files: tuple[Path, ...],
    longer: Literal["error", "cut"],
    backend: str | None,
    device: str | None,
) -> None:
    """Print how the model of RUN (a run directory or a checkpoint) classifies FILES (.wav, .flac or
    .ogg).
    """
    wait_passively()
    import numpy as np
    import torch

    from arb_ternary_audio.data.decode import read_sound
    from arb_ternary_audio.data.recordings import as_pcm
    from arb_ternary_audio.features.mel import MelConfig
    from arb_ternary_audio.features.spectrogram import as_pictures, mel_pictures
    from arb_ternary_train.restore import load_run
    from arb_ternary_vision.predictions import class_names

    if not files:
        raise UsageProblem(
            "FILES: name at least one sound file",
            f"Held-out sounds of the run's data: arb generate {run} --with classify",
        )
    trained = load_run(run, backend=backend, device=device)
    attached = trained.directory.attachments()
    if "sounds" not in attached:
        raise UsageProblem(f"{run}: its data {trained.config.data.name!r} are not labelled sounds")
    facts = attached["sounds"]
    rate = int(facts["sample_rate"])
    length = int(facts["samples"])
    features = MelConfig(**facts["features"])
    samples = np.zeros((len(files), length), dtype=np.int16)
    for row, path in enumerate(files):
        wave = read_sound(path, rate, length / rate, longer)[:length]
        samples[row, : len(wave)] = as_pcm(wave)
    pictures = as_pictures(mel_pictures(samples, features, rate)).float().to(trained.device)
    with torch.no_grad():
        chances = trained.model(pictures).float().softmax(dim=1).cpu()
    names = class_names(attached, chances.shape[1])
    rows = [
        (str(path), names[int(chance.argmax())], f"{float(chance.max()):.3f}")
        for path, chance in zip(files, chances, strict=True)
    ]
    print_table(("sound", "class", "probability"), rows)
