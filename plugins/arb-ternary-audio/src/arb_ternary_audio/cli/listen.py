"""The generator ``listen``: print how a sound classifier classifies sound files."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import click

from arb_ternary.errors import UsageProblem
from arb_ternary_train.cli.options import load_options
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
@load_options
def listen(
    run: Path,
    files: tuple[Path, ...],
    longer: Literal["error", "cut"],
    backend: str | None,
    device: str | None,
) -> None:
    """Print how the model of RUN (a run directory or a checkpoint) classifies FILES.

    FILES are .wav, .flac or .ogg.
    """
    wait_passively()
    import torch

    from arb_ternary.protocols.data import Batch
    from arb_ternary_audio.data.decode import read_sounds
    from arb_ternary_audio.features.mel import MelConfig
    from arb_ternary_audio.features.spectrogram import as_floats, mel_images
    from arb_ternary_train.restore import load_run
    from arb_ternary_vision.cli.classify import classify_run, print_classes
    from arb_ternary_vision.data.source import LABELS
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
    sounds = attached["sounds"]
    rate = int(sounds["sample_rate"])
    length = int(sounds["samples"])
    samples = read_sounds(files, rate, length, length / rate, longer=longer)
    images = as_floats(mel_images(samples, MelConfig(**sounds["features"]), rate)).float()
    labels = {LABELS: torch.zeros(len(files), dtype=torch.int64)}
    batch = Batch(images, torch.arange(len(files)), labels)
    predictions = classify_run(trained, [batch])
    names = class_names(attached, predictions.probabilities.shape[1])
    print_classes("sound", files, predictions, names)
