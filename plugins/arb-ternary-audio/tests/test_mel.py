"""The mel scale and its filter bank against the published formula."""

import math

import numpy as np
import pytest

from arb_ternary.errors import DataError
from arb_ternary_audio.features.mel import MelConfig, from_mel, mel_filter_bank, to_mel


def test_mel_scale():
    # The constants 2595 and 700 are rounded.
    assert to_mel(1000.0) == pytest.approx(1000.0, abs=0.02)
    assert to_mel(0.0) == 0.0
    assert to_mel(700.0) == pytest.approx(2595.0 * math.log10(2.0))
    for mel in (0.0, 123.4, 2000.0):
        assert to_mel(from_mel(mel)) == pytest.approx(mel)


def test_filter_bank_matches_the_formula():
    config = MelConfig(mels=20, window=512, low=100.0, high=3800.0)
    corners = 700.0 * (10.0 ** (np.linspace(to_mel(100.0), to_mel(3800.0), 22) / 2595.0) - 1.0)
    frequencies = np.fft.rfftfreq(512, 1 / 8000)
    expected = [
        np.interp(frequencies, corners[i : i + 3], [0.0, 1.0, 0.0], left=0.0, right=0.0)
        for i in range(20)
    ]
    np.testing.assert_allclose(mel_filter_bank(config, 8000).numpy(), expected, atol=1e-12)


def test_filters_add_up_to_one():
    config = MelConfig(mels=24, window=1024)
    bank = mel_filter_bank(config, 16000).numpy()
    step = (to_mel(8000.0) - to_mel(60.0)) / 25
    first = from_mel(to_mel(60.0) + step)
    last = from_mel(to_mel(60.0) + 24 * step)
    frequencies = np.fft.rfftfreq(1024, 1 / 16000)
    inside = (frequencies >= first) & (frequencies <= last)
    np.testing.assert_allclose(bank.sum(axis=0)[inside], 1.0, atol=1e-12)
    assert not bank[:, frequencies < 60.0].any()
    assert bank.min() == 0.0


@pytest.mark.parametrize(
    ("options", "rate", "words"),
    [
        ({"high": 5000.0}, 8000, "need a sample rate above 10000, not 8000"),
        ({"low": 4000.0}, 8000, "need a sample rate above 8000"),
        ({"mels": 200}, 8000, "holds none of the window's frequencies, which are 31.25 Hz apart"),
    ],
)
def test_filter_bank_refuses_bands_that_do_not_fit(options, rate, words):
    with pytest.raises(DataError, match=words):
        mel_filter_bank(MelConfig(**options), rate)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"hop": 193}, "'hop' must be at most 3/4 of 'window'"),
        ({"low": 900.0, "high": 800.0}, "'high' must be above 'low'"),
        ({"window": 255}, "an even number"),
        ({"mels": 1}, "from 2 to 1024"),
    ],
)
def test_config_refuses_contradictions(options, words):
    with pytest.raises(ValueError, match=words):
        MelConfig(**options)
