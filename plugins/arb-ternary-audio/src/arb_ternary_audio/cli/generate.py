"""Implement ``arb generate`` for runs on audio codes: draw or continue sounds and write them to a
file.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from arb_ternary.cli.options import plugin_files
from arb_ternary_train.openmp import wait_passively

if TYPE_CHECKING:
    from arb_ternary_audio.codes.codec import SoundCodec

#: Longest prompt, in seconds.
_LONGEST = 60.0


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    help="A .wav or .flac file.",
)
@click.option(
    "--prompt-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Sound file to continue. Its decoded codes come first in the output. Default: none.",
)
@click.option(
    "--count",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Number of sounds, written one after another.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=0.0, min_open=True),
    default=10.0,
    show_default=True,
    help="Longest duration of one sound, in seconds. The model may end it earlier.",
)
@click.option(
    "--temperature",
    type=click.FloatRange(min=0.0),
    default=0.8,
    show_default=True,
    help="Sampling temperature; 0 takes the most likely code.",
)
@click.option(
    "--top-k",
    type=click.IntRange(min=1),
    help="Sample from this many of the most likely codes only.",
)
@click.option(
    "--top-p",
    type=click.FloatRange(0.0, 1.0, min_open=True),
    help="Sample from the most likely codes whose probabilities add up to this.",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    help="Seed of the sampling; the same seed gives the same sounds. Default: random.",
)
@click.option(
    "--backend",
    metavar="NAME",
    help="Kernel backend, over ARB_TERNARY_BACKEND and the run's config.",
)
@click.option("--device", help="cpu, cuda, cuda:N or mps; default: the run's own.")
@plugin_files
def sound(
    run: Path,
    output: Path,
    prompt_file: Path | None,
    count: int,
    seconds: float,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    seed: int | None,
    backend: str | None,
    device: str | None,
) -> None:
    """Draw sounds from the model of RUN (a run directory or a checkpoint) and write them to
    --output.
    """
    wait_passively()
    from arb_ternary.errors import ArbError, UsageProblem
    from arb_ternary_audio.codes.codec import SoundCodec
    from arb_ternary_audio.codes.source import CODEC
    from arb_ternary_text.models.generate import CachedModel, generate
    from arb_ternary_train.restore import load_run

    if output.suffix.lower() not in (".wav", ".flac"):
        raise UsageProblem(f"--output {output}: the output must be a .wav or .flac file")
    trained = load_run(run, backend=backend, device=device)
    if not isinstance(trained.model, CachedModel):
        raise UsageProblem(
            f"{run}: the model {trained.config.model.name!r} cannot generate sounds: it has no "
            f"new_cache()"
        )
    attached = trained.directory.attachments()
    if CODEC not in attached:
        raise UsageProblem(
            f"{run}: its data {trained.config.data.name!r} has no sound codec",
            "Train on the data source audio_codes.",
        )
    codec = SoundCodec.from_json(attached[CODEC])
    given = [] if prompt_file is None else _codes_of(prompt_file, codec)
    most = max(1, round(seconds * codec.sample_rate / codec.features.hop))
    frames: list[int] = []
    for number in range(count):
        drawn = generate(
            trained.model,
            [codec.boundary, *given],
            max_new_tokens=most,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=None if seed is None else seed + number,
            stop=(codec.boundary,),
            device=trained.device,
        )
        frames += [*given, *drawn]
    if not frames:
        raise ArbError(
            f"{run}: the model ended the sound before its first frame", "Try another --seed."
        )
    wave = codec.decode(frames)
    _write(output, wave, codec.sample_rate)
    click.echo(
        f"{output}: {len(frames)} codes, {len(wave) / codec.sample_rate:.2f} s at "
        f"{codec.sample_rate} Hz"
    )


def _codes_of(path: Path, codec: SoundCodec) -> list[int]:
    from arb_ternary_audio.data.decode import read_sound
    from arb_ternary_audio.data.recordings import as_pcm

    codes: Sequence[int] = codec.encode(
        as_pcm(read_sound(path, codec.sample_rate, _LONGEST))[None]
    )[0].tolist()
    return list(codes)


def _write(path: Path, wave: Any, sample_rate: int) -> None:
    import soundfile

    from arb_ternary.errors import ArbError
    from arb_ternary_train.durable import replacing

    try:
        with replacing(path) as temporary:
            soundfile.write(
                temporary, wave, sample_rate, subtype="PCM_16", format=path.suffix[1:].upper()
            )
    except (OSError, soundfile.LibsndfileError) as error:
        raise ArbError(f"{path}: cannot be written: {error}") from error
