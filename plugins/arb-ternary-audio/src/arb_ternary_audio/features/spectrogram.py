"""Compute log-mel spectrograms.

Shapes: ``N`` sounds, ``L`` samples, ``T = L // hop`` frames, ``F`` frequencies, ``M`` mel bands.
Everything is computed in float64, so that the float32 result hardly depends on the order of
summation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from arb_ternary.errors import DataError
from arb_ternary_audio.features.mel import MelConfig, mel_filter_bank

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

#: The highest grey level of a spectrogram.
LEVELS: Final = 255
#: Sounds transformed at a time. It bounds the memory for spectra.
_CHUNK: Final = 64
#: Power below which a sound is silence: -160 dB of a full-scale square wave.
_SILENCE: Final = 1e-16


def short_time_spectrum(waves_NL: Tensor, config: MelConfig) -> Tensor:
    """Return complex spectra ``[N, F, T]`` of Hann windows whose centres are ``hop`` samples apart.

    Sounds are padded with zeros.

    Raises:
        DataError: a sound is shorter than one hop.
    """
    length = waves_NL.shape[-1]
    frames = length // config.hop
    if frames < 1:
        raise DataError(
            f"features: a sound of {length} samples is shorter than one hop of {config.hop}",
            "Set a smaller hop.",
        )
    window = torch.hann_window(config.window, periodic=True, dtype=waves_NL.dtype)
    spectrum = torch.stft(
        waves_NL,
        config.window,
        config.hop,
        window=window,
        center=True,
        pad_mode="constant",
        return_complex=True,
    )
    return spectrum[..., :frames]


def mel_power(waves_NL: Tensor, config: MelConfig, sample_rate: int) -> Tensor:
    """Return the power of each band in each frame, ``[N, M, T]``, in the dtype of ``waves_NL``.

    Samples are in [-1, 1].
    """
    bank_MF = mel_filter_bank(config, sample_rate).to(waves_NL.dtype)
    power_NFT = short_time_spectrum(waves_NL, config).abs().square()
    return bank_MF @ power_NFT


def decibels(power: Tensor, range_db: float) -> Tensor:
    """Convert ``[N, M, T]`` to decibels relative to the loudest point of each sound.

    The result lies between ``-range_db`` and 0; silence is ``-range_db``. It does not depend on how
    loud a recording is.
    """
    peak = power.amax(dim=(1, 2), keepdim=True)
    relative = 10.0 * (power / peak.clamp_min(_SILENCE)).clamp_min(1e-30).log10()
    return torch.where(peak > _SILENCE, relative.clamp(-range_db, 0.0), -range_db)


def log_mel(waves_NL: Tensor, config: MelConfig, sample_rate: int) -> Tensor:
    """Return log-mel spectrograms ``[N, M, T]`` in [-1, 1].

    1 is the loudest point of a sound, -1 is ``range_db`` below it.
    """
    level_db = decibels(mel_power(waves_NL, config, sample_rate), config.range_db)
    return level_db * (2.0 / config.range_db) + 1.0


def mel_images(samples_NL: NDArray[Any], config: MelConfig, sample_rate: int) -> NDArray[np.uint8]:
    """Return :func:`log_mel` of 16-bit samples as grey-scale images, uint8 ``[N, 1, M, T]``.

    Level 0 stands for -1 and 255 for 1; a level is ``range_db / 255``, by default a third of a
    decibel. Integer levels make the images of the same sounds equal for any number of threads.
    """
    parts = []
    for first in range(0, len(samples_NL), _CHUNK):
        waves = torch.from_numpy(samples_NL[first : first + _CHUNK]).double() / 32768.0
        levels = ((log_mel(waves, config, sample_rate) + 1.0) * (LEVELS / 2)).round()
        parts.append(levels.to(torch.uint8).numpy())
    return np.concatenate(parts)[:, None]


def as_floats(levels: NDArray[np.uint8]) -> Tensor:
    """Convert grey levels to numbers in [-1, 1], float64."""
    return torch.from_numpy(levels).double() * (2.0 / LEVELS) - 1.0
