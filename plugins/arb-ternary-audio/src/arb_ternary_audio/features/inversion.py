"""Turn spectrograms back into samples: magnitudes from mel bands, phases by Griffin and Lim.

A spectrogram has no phases, and fewer bands than the spectrum has frequencies, so the result is an
approximation.

Shapes: as in ``spectrogram``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from arb_ternary_audio.features.mel import MelConfig, mel_filter_bank
from arb_ternary_audio.features.spectrogram import short_time_spectrum


def band_power(level_NMT: Tensor, config: MelConfig) -> Tensor:
    """Return the power relative to the loudest point, ``[N, M, T]`` float64.

    ``level_NMT`` are spectrograms in [-1, 1]; -1 is silence.
    """
    level = level_NMT.double()
    power = 10.0 ** ((level - 1.0) * (config.range_db / 20.0))
    return torch.where(level <= -1.0, 0.0, power)


def mel_to_magnitudes(
    power_NMT: Tensor, config: MelConfig, sample_rate: int, iterations: int = 100
) -> Tensor:
    """Return non-negative magnitudes ``[N, F, T]`` whose mel bands best approximate ``power_NMT``.

    Least squares by multiplicative updates (Lee and Seung, 2001), which keep positive numbers
    positive.
    """
    bank = mel_filter_bank(config, sample_rate).to(power_NMT.dtype)
    target = bank.T @ power_NMT
    gram = bank.T @ bank
    power = target.clone()
    for _ in range(iterations):
        power = power * target / (gram @ power).clamp_min(1e-30)
    return power.sqrt()


def griffin_lim(
    magnitude_NFT: Tensor, config: MelConfig, iterations: int = 60, seed: int = 0
) -> Tensor:
    """Return samples ``[N, T * hop]`` whose short-time magnitudes approximate ``magnitude_NFT``.

    Griffin and Lim (1984): start from random phases; repeatedly take the spectrum of the samples,
    restore its magnitudes, and transform back. The distance never grows.
    """
    frames = magnitude_NFT.shape[-1]
    generator = torch.Generator().manual_seed(seed)
    turns = torch.rand(magnitude_NFT.shape, dtype=torch.float64, generator=generator)
    angle = turns * (2.0 * torch.pi)
    phase = torch.polar(torch.ones_like(angle), angle)
    window = torch.hann_window(config.window, periodic=True, dtype=torch.float64)
    length = frames * config.hop

    def samples(spectrum: Tensor) -> Tensor:
        # Add one frame of silence: the last samples lie under its window.
        whole = torch.nn.functional.pad(spectrum, (0, 1))
        return torch.istft(
            whole, config.window, config.hop, window=window, center=True, length=length
        )

    for _ in range(iterations):
        estimate = short_time_spectrum(samples(magnitude_NFT * phase), config)
        phase = estimate / estimate.abs().clamp_min(1e-30)
    return samples(magnitude_NFT * phase)


def to_waves(
    level_NMT: Tensor, config: MelConfig, sample_rate: int, *, iterations: int = 60
) -> Tensor:
    """Return samples ``[N, T * hop]``, float64, of spectrograms in [-1, 1].

    The peak of each sound is 0.9; silence stays silent.
    """
    power = band_power(level_NMT, config)
    waves = griffin_lim(mel_to_magnitudes(power, config, sample_rate), config, iterations)
    peak = waves.abs().amax(dim=-1, keepdim=True)
    return torch.where(peak > 0, 0.9 * waves / peak.clamp_min(1e-30), waves)
