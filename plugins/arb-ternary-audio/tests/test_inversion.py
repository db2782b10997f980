"""Turning spectrograms back into sounds."""

import numpy as np
import torch

from arb_ternary_audio.features.inversion import (
    band_power,
    griffin_lim,
    mel_to_magnitudes,
    to_waves,
)
from arb_ternary_audio.features.mel import MelConfig, mel_filter_bank
from arb_ternary_audio.features.spectrogram import decibels, log_mel, short_time_spectrum

CONFIG = MelConfig(hop=64)


def _wave():
    at = np.arange(4000) / 8000
    return torch.from_numpy(np.sin(2 * np.pi * (300 * at + 800 * at**2)) * np.hanning(4000))[None]


def test_band_power_inverts_decibels():
    power = (
        torch.rand((2, 32, 9), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        + 1e-3
    )
    spectrogram = decibels(power, 80.0) / 40.0 + 1.0
    relative = power / power.flatten(1).amax(dim=1)[:, None, None]
    torch.testing.assert_close(band_power(spectrogram, CONFIG), relative)
    assert not band_power(torch.full((1, 2, 3), -1.0), CONFIG).any()


def test_magnitudes_have_the_power_of_their_bands():
    bank = mel_filter_bank(CONFIG, 8000)
    power = short_time_spectrum(_wave(), CONFIG).abs().square()
    found = mel_to_magnitudes(bank @ power, CONFIG, 8000)
    error = (bank @ found.square() - bank @ power).norm() / (bank @ power).norm()
    assert found.min() >= 0
    assert float(error) < 0.02


def test_griffin_lim_approaches_the_magnitudes():
    magnitude = short_time_spectrum(_wave(), CONFIG).abs()

    def distance(iterations):
        samples = griffin_lim(magnitude, CONFIG, iterations)
        return float(
            (short_time_spectrum(samples, CONFIG).abs() - magnitude).norm() / magnitude.norm()
        )

    distances = [distance(iterations) for iterations in (0, 5, 60)]
    assert distances == sorted(distances, reverse=True)
    assert distances[-1] < 0.15 < distances[0]


def test_tone_keeps_its_pitch():
    at = torch.arange(4096, dtype=torch.float64) / 8000
    spectrogram = log_mel(torch.sin(2 * torch.pi * 1000 * at)[None], CONFIG, 8000)
    heard = to_waves(spectrogram, CONFIG, 8000)
    assert heard.shape == (1, 4096)
    assert abs(float(heard.abs().max()) - 0.9) < 1e-12
    loudest = int(torch.fft.rfft(heard[0]).abs().argmax()) * 8000 / 4096
    # A spectrogram knows the band of a pitch only; bands near 1000 Hz are about 100 Hz wide.
    assert abs(loudest - 1000) < 60
    assert torch.equal(heard, to_waves(spectrogram, CONFIG, 8000))


def test_silence_stays_silent():
    assert not to_waves(torch.full((1, 32, 10), -1.0), CONFIG, 8000).any()
