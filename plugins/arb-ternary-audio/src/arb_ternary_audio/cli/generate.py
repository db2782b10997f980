"""The generator ``sound``: draw or continue sounds with a model of audio codes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from arb_ternary_text.cli.options import sampling_options
from arb_ternary_train.cli.options import load_options
from arb_ternary_train.openmp import wait_passively

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from arb_ternary_audio.codes.codec import SoundCodec

#: Longest prompt, in seconds.
_LONGEST_PROMPT = 60.0


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
@sampling_options
@load_options
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
    """Draw sounds with the model of RUN, a run directory or a checkpoint.

    They are written to --output.
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
    prompt = [] if prompt_file is None else _encode_file(prompt_file, codec)
    longest = max(1, round(seconds * codec.sample_rate / codec.features.hop))
    codes: list[int] = []
    for number in range(count):
        drawn = generate(
            trained.model,
            [codec.boundary, *prompt],
            max_new_tokens=longest,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=None if seed is None else seed + number,
            stop=(codec.boundary,),
            device=trained.device,
        )
        codes += [*prompt, *drawn]
    if not codes:
        raise ArbError(
            f"{run}: the model ended the sound before its first frame", "Try another --seed."
        )
    wave = codec.decode(codes)
    _write(output, wave, codec.sample_rate)
    click.echo(
        f"{output}: {len(codes)} codes, {len(wave) / codec.sample_rate:.2f} s at "
        f"{codec.sample_rate} Hz"
    )


def _encode_file(path: Path, codec: SoundCodec) -> list[int]:
    """Return the codes of the sound in a file."""
    from arb_ternary_audio.data.decode import as_pcm, read_sound

    samples_1L = as_pcm(read_sound(path, codec.sample_rate, _LONGEST_PROMPT))[None]
    codes: list[int] = codec.encode(samples_1L)[0].tolist()
    return codes


def _write(path: Path, wave: NDArray[np.float64], sample_rate: int) -> None:
    """Write a sound as 16-bit samples, whole or not at all; the suffix chooses the format."""
    import soundfile

    from arb_ternary.errors import ArbError
    from arb_ternary_train.durable import replacing

    sound_format = path.suffix[1:].upper()
    try:
        with replacing(path) as temporary:
            soundfile.write(temporary, wave, sample_rate, subtype="PCM_16", format=sound_format)
    except (OSError, soundfile.LibsndfileError) as error:
        raise ArbError(f"{path}: cannot be written: {error}") from error
