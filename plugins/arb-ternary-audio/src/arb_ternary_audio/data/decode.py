"""Decode sound files (libsndfile) to samples of one rate and length (resampled by scipy).

Files are not trusted: their claims are checked before memory is allocated for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from math import gcd
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from arb_ternary.errors import DataError

#: Suffixes of the files that are read.
SUFFIXES: Final = frozenset({".wav", ".flac", ".ogg"})
#: Sample rates in Hz and numbers of channels that a file may have.
_RATES: Final = (1000, 384_000)
_CHANNELS: Final = 64
#: Largest numerator or denominator of the ratio of two rates: the filter has twenty taps for each.
_RATIO: Final = 4000


def read_sound(
    path: Path, sample_rate: int, longest: float, longer: Literal["error", "cut"] = "error"
) -> NDArray[np.float64]:
    """Read the sound in ``path``: ``[L]``, mean of the channels, full scale 1, at ``sample_rate``.

    Args:
        path: a file that libsndfile reads.
        sample_rate: of the result, in Hz.
        longest: maximum duration in seconds.
        longer: what to do with a longer sound: an error, or keep its beginning.

    Raises:
        DataError: the file is damaged, empty, too long, has an unsupported rate or number of
            channels, or holds numbers that are not finite. The message begins with the path.
    """
    soundfile: Any = import_module("soundfile")
    try:
        info = soundfile.info(path)
        frames = int(info.frames)
        rate = int(info.samplerate)
        channels = int(info.channels)
    except (OSError, soundfile.LibsndfileError) as error:
        raise DataError(f"{path}: the sound cannot be read: {error}") from error
    if not _RATES[0] <= rate <= _RATES[1] or not 1 <= channels <= _CHANNELS:
        raise DataError(
            f"{path}: {rate} Hz and {channels} channels; supported are {_RATES[0]} to {_RATES[1]} "
            f"Hz and up to {_CHANNELS} channels"
        )
    if frames < 1:
        raise DataError(f"{path}: the sound is empty", "Remove the file.")
    limit = int(np.ceil(longest * rate))
    if frames > limit and longer == "error":
        raise DataError(
            f"{path}: {frames / rate:.2f} s, and a sample has {longest:g} s",
            "Set `seconds` to the longest duration, or `longer: cut` to keep the beginning of each "
            "sound.",
        )
    try:
        channels_LC, _ = soundfile.read(
            path, frames=min(frames, limit), dtype="float64", always_2d=True
        )
    except (OSError, soundfile.LibsndfileError) as error:
        raise DataError(f"{path}: the sound cannot be decoded: {error}") from error
    if len(channels_LC) < 1:
        raise DataError(f"{path}: the header claims {frames} samples, and there are none")
    wave = channels_LC.mean(axis=1)
    wrong = np.flatnonzero(~np.isfinite(wave))
    if wrong.size:
        raise DataError(f"{path}: sample {int(wrong[0])} is not a finite number")
    try:
        return resample(wave, rate, sample_rate)
    except DataError as error:
        raise DataError(
            f"{path}: {error.what}", f"ffmpeg -i {path} -ar {sample_rate} OTHER.wav"
        ) from error


def read_sounds(
    paths: Sequence[Path],
    sample_rate: int,
    length: int,
    longest: float,
    *,
    longer: Literal["error", "cut"],
) -> NDArray[np.int16]:
    """Read sounds as 16-bit samples ``[N, length]``; shorter ones are padded with silence.

    Args:
        paths: files that libsndfile reads.
        sample_rate: of the result, in Hz.
        length: samples per sound.
        longest: maximum duration in seconds.
        longer: what to do with a longer sound: an error, or keep its beginning.

    Raises:
        DataError: as for :func:`read_sound`.
    """
    samples_NL = np.zeros((len(paths), length), dtype=np.int16)
    for row, path in enumerate(paths):
        wave = read_sound(path, sample_rate, longest, longer)[:length]
        samples_NL[row, : len(wave)] = as_pcm(wave)
    return samples_NL


def as_pcm(waves: NDArray[Any]) -> NDArray[np.int16]:
    """Convert samples in [-1, 1] to 16-bit integers, rounded to the nearest.

    Louder samples are clipped.
    """
    return np.clip(np.rint(waves * 32768.0), -32768, 32767).astype(np.int16)


def resample(wave: NDArray[np.float64], rate: int, wanted: int) -> NDArray[np.float64]:
    """Resample ``wave`` with scipy's polyphase filter (a Kaiser window of 5).

    Raises:
        DataError: the ratio of the rates has too large a numerator or denominator.
    """
    if rate == wanted:
        return wave
    shared = gcd(rate, wanted)
    up = wanted // shared
    down = rate // shared
    if max(up, down) > _RATIO:
        raise DataError(
            f"{rate} Hz cannot be resampled to {wanted} Hz: their ratio is {up} to {down}"
        )
    from scipy.signal import resample_poly

    return np.asarray(resample_poly(wave, up, down))
