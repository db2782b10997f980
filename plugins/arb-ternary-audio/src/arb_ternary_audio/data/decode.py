"""Decode sound files (libsndfile) to samples of one rate and length (resampled by scipy).

Files are not trusted: their claims are checked before memory is allocated for them.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from importlib import import_module
from math import gcd
from os import SEEK_CUR, SEEK_END
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal

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
#: Largest sample of a file, where full scale is 1. Louder files hold integers stored as floats.
_LOUDEST: Final = 8.0
#: Least variance of the sum of the channels, relative to the sum of their variances. It is 1 if the
#: channels have nothing in common, their number if they are equal, and 0 if they cancel out.
_LEAST_SUM: Final = 0.01
#: Sizes of a wav file's samples from here on say nothing: programs that write to a pipe do not know
#: the size, and state one of these (ffmpeg 0xFFFFFFFF, sox 0x7FFFF000).
_UNKNOWN_SIZE: Final = 0x7FFFF000


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
        DataError: the file is damaged, cut off, empty, too long, has an unsupported rate or number
            of channels, holds numbers that are not finite or far beyond full scale, or has channels
            that cancel out. The message begins with the path.
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
    # libsndfile passes over the missing end of a wav file.
    _require_whole_wav(path)
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
    _require_full_scale(path, channels_LC)
    _require_sum(path, channels_LC)
    return resample(path, wave, rate, sample_rate)


def _require_whole_wav(path: Path) -> None:
    """Check that a wav file holds as many bytes of samples as its header promises.

    Files of other formats pass.

    Raises:
        DataError: bytes are missing, or the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            whole = file.seek(0, SEEK_END)
            file.seek(0)
            samples = _wav_samples(file)
    except OSError as error:
        raise DataError(f"{path}: the sound cannot be read: {error.strerror}") from error
    if samples is None:
        return
    start, size = samples
    held = max(whole - start, 0)
    if held < size < _UNKNOWN_SIZE:
        raise DataError(
            f"{path}: the header promises {size} bytes of samples, and the file holds {held}",
            f"The end is missing: copy the file again, or keep what there is: ffmpeg -i {path} "
            "OTHER.wav",
        )


def _wav_samples(file: BinaryIO) -> tuple[int, int] | None:
    """Return where the samples of a wav file start and their size, both in bytes.

    None: the file is of another format, or has no samples.
    """
    riff, _, form = struct.unpack("<4sI4s", file.read(12).ljust(12, b"\0"))
    if riff not in (b"RIFF", b"RIFX") or form != b"WAVE":
        return None
    layout = "<4sI" if riff == b"RIFF" else ">4sI"
    while len(header := file.read(8)) == 8:
        name, size = struct.unpack(layout, header)
        if name == b"data":
            return file.tell(), size
        # Chunks begin at even offsets.
        file.seek(size + size % 2, SEEK_CUR)
    return None


def _require_full_scale(path: Path, channels_LC: NDArray[np.float64]) -> None:
    """Check that the samples of a file are not in the range of integers.

    Raises:
        DataError: they are, and nearly all of them would be clipped.
    """
    loudest = float(np.abs(channels_LC).max())
    if loudest <= _LOUDEST:
        return
    if loudest > 32768:
        raise DataError(
            f"{path}: samples reach {loudest:g}, and full scale is 1",
            "Divide the samples by the largest value that they can have.",
        )
    raise DataError(
        f"{path}: samples reach {loudest:g}, and full scale is 1: they seem to be 16-bit integers "
        "stored as floats",
        f"Divide them by 32768: ffmpeg -i {path} -af volume=1/32768 OTHER.wav",
    )


def _require_sum(path: Path, channels_LC: NDArray[np.float64]) -> None:
    """Check that the channels of a file do not cancel out when they are averaged.

    Raises:
        DataError: they do, although they are not silent.
    """
    if channels_LC.shape[1] == 1:
        return
    # A constant offset is not heard.
    sounds_LC = channels_LC - channels_LC.mean(axis=0)
    is_silent = not as_pcm(sounds_LC).any()
    if is_silent:
        return
    if sounds_LC.sum(axis=1).var() < _LEAST_SUM * sounds_LC.var(axis=0).sum():
        raise DataError(
            f"{path}: the channels cancel out: their mean is nearly silent, and they are not",
            f"Keep one of them: ffmpeg -i {path} -af 'pan=mono|c0=c0' OTHER.wav",
        )


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


def resample(path: Path, wave: NDArray[np.float64], rate: int, wanted: int) -> NDArray[np.float64]:
    """Resample ``wave``, read from ``path``, with scipy's polyphase filter (a Kaiser window of 5).

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
            f"{path}: {rate} Hz cannot be resampled to {wanted} Hz: their ratio is {up} to {down}",
            f"ffmpeg -i {path} -ar {wanted} OTHER.wav",
        )
    from scipy.signal import resample_poly

    return np.asarray(resample_poly(wave, up, down))
