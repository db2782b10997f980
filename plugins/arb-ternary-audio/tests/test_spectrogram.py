"""Spectrograms against explicit transforms, scipy, sums of squares and tones."""

import numpy as np
import pytest
import torch
from scipy.signal import ShortTimeFFT, get_window

from arb_ternary.errors import DataError
from arb_ternary_audio.data.decode import as_pcm
from arb_ternary_audio.features.mel import MelConfig, to_mel
from arb_ternary_audio.features.spectrogram import (
    as_floats,
    decibels,
    log_mel,
    mel_images,
    mel_power,
    short_time_spectrum,
)

CONFIG = MelConfig()


def _tone(hertz, amplitude=1.0, length=6400, rate=8000):
    return amplitude * np.sin(2 * np.pi * hertz * np.arange(length) / rate)


def test_spectrum_matches_padded_windows():
    wave = np.random.default_rng(0).standard_normal(1000)
    found = short_time_spectrum(torch.from_numpy(wave)[None], CONFIG)[0].numpy()
    padded = np.pad(wave, 128)
    window = get_window("hann", 256, fftbins=True)
    expected = [np.fft.rfft(padded[160 * t : 160 * t + 256] * window) for t in range(1000 // 160)]
    np.testing.assert_allclose(found, np.transpose(expected), atol=1e-10)


def test_spectrum_matches_scipy():
    wave = np.random.default_rng(1).standard_normal(1600)
    transform = ShortTimeFFT(get_window("hann", 256, fftbins=True), 160, fs=8000, phase_shift=None)
    expected = transform.stft(wave, p0=0, p1=10, k_offset=0)
    np.testing.assert_allclose(
        short_time_spectrum(torch.from_numpy(wave)[None], CONFIG)[0].numpy(), expected, atol=1e-10
    )


def test_spectrum_keeps_the_energy_of_a_window():
    wave = np.random.default_rng(2).standard_normal(640)
    spectrum = short_time_spectrum(torch.from_numpy(wave)[None], CONFIG)[0].abs().square().numpy()
    windowed = wave[160 * 2 - 128 : 160 * 2 + 128] * get_window("hann", 256, fftbins=True)
    # All but the first and last stand for two frequencies.
    twice = 2 * spectrum[:, 2].sum() - spectrum[0, 2] - spectrum[-1, 2]
    assert twice / 256 == pytest.approx((windowed**2).sum())


@pytest.mark.parametrize("hertz", [200.0, 500.0, 1000.0, 1687.5, 3000.0])
def test_tone_lands_in_the_nearest_band(hertz):
    power = mel_power(torch.from_numpy(_tone(hertz))[None], MelConfig(mels=20), 8000)[0].numpy()
    step = (to_mel(4000.0) - to_mel(60.0)) / 21
    nearest = round((to_mel(hertz) - to_mel(60.0)) / step) - 1
    assert set(power[:, 5:35].argmax(axis=0)) == {nearest}


def test_decibels_are_relative_to_the_loudest_point():
    power = torch.tensor([[[4.0, 1.0, 0.04, 4e-12]]], dtype=torch.float64)
    expected = [0.0, 10 * np.log10(0.25), -20.0, -80.0]
    np.testing.assert_allclose(decibels(power, 80.0)[0, 0].numpy(), expected, atol=1e-12)


def test_log_mel_ignores_loudness():
    quiet = _tone(700, 0.1)
    loud = _tone(700, 0.8)
    both = log_mel(torch.from_numpy(np.stack([quiet, loud, np.zeros(6400)])), CONFIG, 8000)
    np.testing.assert_allclose(both[0].numpy(), both[1].numpy(), atol=1e-9)
    assert both[0].max() == 1.0
    assert (both[2] == -1.0).all()


def test_images_are_grey_levels_of_the_spectrogram():
    samples = as_pcm(np.stack([_tone(400, 0.5), np.zeros(6400)]))
    levels = mel_images(samples, CONFIG, 8000)
    assert levels.shape == (2, 1, 32, 40)
    assert levels.dtype == np.uint8
    exact = log_mel(torch.from_numpy(samples / 32768.0), CONFIG, 8000)
    assert float((as_floats(levels)[:, 0] - exact).abs().max()) <= 1 / 255 + 1e-12
    assert levels[0].max() == 255
    assert not levels[1].any()


def test_sound_without_a_frame_is_refused():
    with pytest.raises(DataError, match="a sound of 100 samples is shorter than one hop of 160"):
        mel_images(np.zeros((1, 100), dtype=np.int16), CONFIG, 8000)
