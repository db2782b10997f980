"""Sound files as samples of one rate and length: decoded by libsndfile, resampled by scipy.

Files are of strangers: what they claim is checked before memory is taken for it.
"""

from __future__ import annotations

from importlib import import_module
from math import gcd
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from arb_ternary.errors import DataError

#: Endings of the files that are read.
SUFFIXES: Final = (".wav", ".flac", ".ogg")
#: Rates in Hz and channels that a file may claim.
_RATES: Final = (1000, 384_000)
_CHANNELS: Final = 64
# : Largest of the two whole numbers by whose ratio a rate is changed: the filter has twenty taps
# for each.
_RATIO: Final = 4000


def read_sound(
    path: Path, sample_rate: int, longest: float, longer: Literal["error", "cut"] = "error"
) -> NDArray[np.float64]:
    """The sound in ``path``, ``[L]``, mean of its channels, full scale 1, at ``sample_rate``.

    Args:
        path: a file that libsndfile reads.
        sample_rate: wanted, Hz.
        longest: seconds.
        longer: what becomes of a longer sound.

    Raises:
        DataError: the file is damaged, empty, of a rate or with channels beyond all bounds, too
            long, or holds numbers that are not finite; its path comes first.
    """
    soundfile: Any = import_module("soundfile")
    try:
        facts = soundfile.info(path)
        frames = int(facts.frames)
        rate = int(facts.samplerate)
        channels = int(facts.channels)
    except (OSError, soundfile.LibsndfileError) as error:
        raise DataError(f"{path}: the sound cannot be read: {error}") from error
    if not _RATES[0] <= rate <= _RATES[1] or not 1 <= channels <= _CHANNELS:
        raise DataError(
            f"{path}: {rate} Hz and {channels} channels; sounds of {_RATES[0]} to {_RATES[1]} Hz "
            f"with up to {_CHANNELS} channels are read"
        )
    if frames < 1:
        raise DataError(f"{path}: the sound is empty", "Remove the file.")
    most = int(np.ceil(longest * rate))
    if frames > most and longer == "error":
        raise DataError(
            f"{path}: {frames / rate:.2f} s, and a sample has {longest:g} s",
            "Set seconds to the longest sound, or longer to cut to keep the beginning of each.",
        )
    try:
        channels_LC, _ = soundfile.read(
            path, frames=min(frames, most), dtype="float64", always_2d=True
        )
    except (OSError, soundfile.LibsndfileError) as error:
        raise DataError(f"{path}: the sound cannot be decoded: {error}") from error
    if len(channels_LC) < 1:
        raise DataError(f"{path}: the file claims {frames} samples and holds none")
    wave = channels_LC.mean(axis=1)
    if not np.isfinite(wave).all():
        raise DataError(
            f"{path}: sample {int(np.flatnonzero(~np.isfinite(wave))[0])} is not a finite number"
        )
    try:
        return resampled(wave, rate, sample_rate)
    except DataError as error:
        raise DataError(
            f"{path}: {error.what}", f"ffmpeg -i {path} -ar {sample_rate} OTHER.wav"
        ) from error


def resampled(wave: NDArray[np.float64], rate: int, wanted: int) -> NDArray[np.float64]:
    """``wave`` at another rate, by scipy's polyphase filter (a Kaiser window of 5).

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
