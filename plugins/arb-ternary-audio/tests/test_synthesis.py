"""Synthetic words: pitch, formants, noise and fixed random numbers."""

import itertools

import numpy as np
import pytest
from numpy.random import RandomState

from arb_ternary_audio.data.phones import PHONES, WORDS
from arb_ternary_audio.data.synthesis import (
    LENGTH,
    SAMPLE_RATE,
    Voice,
    draw_voice,
    speak_segments,
    speak_word,
)


def _voice(segments, pitch=100.0, tract=1.0):
    return Voice(pitch, 0.0, tract, np.ones(4), np.ones(segments), np.ones(segments))


def _power_around(wave, hertz, width=80.0):
    spectrum = np.abs(np.fft.rfft(wave * np.hanning(len(wave)))) ** 2
    frequencies = np.fft.rfftfreq(len(wave), 1 / SAMPLE_RATE)
    return spectrum[np.abs(frequencies - hertz) < width].mean()


@pytest.mark.parametrize(
    ("vowel", "formants"), [("i", (270, 2290, 3010)), ("e", (530, 1840)), ("u", (300, 870))]
)
def test_vowels_resonate_at_their_formants(vowel, formants):
    wave = speak_segments(PHONES[vowel], _voice(1), RandomState(0))
    for formant, following in itertools.pairwise(formants):
        valley = _power_around(wave, (formant + following) / 2)
        assert _power_around(wave, formant) > 2 * valley
        assert _power_around(wave, following) > 2 * valley


def test_shorter_tract_moves_formants_up():
    high = speak_segments(PHONES["i"], _voice(1, tract=1.2), RandomState(0))
    low = speak_segments(PHONES["i"], _voice(1), RandomState(0))
    assert _power_around(high, 1.2 * 2290) / _power_around(high, 2290) > 1.0
    assert _power_around(low, 1.2 * 2290) / _power_around(low, 2290) < 1.0


def test_voiced_sounds_repeat_with_the_pitch():
    wave = speak_segments(PHONES["a"], _voice(1, pitch=125.0), RandomState(0))
    wave = wave - wave.mean()
    echoes = np.correlate(wave, wave, "full")[len(wave) - 1 :]
    period = 40 + int(echoes[40:120].argmax())
    assert SAMPLE_RATE / period == pytest.approx(125.0, rel=0.03)


def test_stop_is_silent_before_its_burst():
    closure, burst = PHONES["k"]
    wave = speak_segments(PHONES["k"], _voice(2), RandomState(0))
    edge = int(closure.milliseconds * SAMPLE_RATE / 1000)
    silent = wave[: edge // 2]
    loud = wave[edge:]
    assert np.mean(silent**2) < 1e-4 * np.mean(loud**2)
    assert _power_around(wave, burst.noise_at, 300) > 10 * _power_around(wave, 500, 200)


def test_noise_has_the_given_ratio():
    clean, noisy = (
        speak_word(WORDS["masi"], RandomState(3), (level, level)) for level in (300.0, 20.0)
    )
    scale = (noisy @ clean) / (clean @ clean)
    noise = noisy - scale * clean
    spoken = np.flatnonzero(np.abs(clean) > 1e-9)
    word = scale * clean[spoken[0] : spoken[-1] + 1]
    assert 10 * np.log10(np.mean(word**2) / np.mean(noise**2)) == pytest.approx(20.0, abs=0.3)


def test_random_numbers_are_fixed():
    first, again, other = (
        speak_word(WORDS["tuke"], RandomState(seed), (10, 30)) for seed in (7, 7, 8)
    )
    assert first.shape == (LENGTH,)
    assert np.array_equal(first, again)
    assert not np.allclose(first, other)
    # Recorded values: the voices must stay the same with every release of numpy.
    voice = draw_voice(RandomState(0), 2)
    assert voice.pitch == pytest.approx(90.0 * 2 ** (1.4 * 0.5488135039273248))
    assert voice.fall == pytest.approx(-0.1 + 0.4 * 0.7151893663724195)


def test_partner_words_have_the_same_syllables():
    names = list(WORDS)
    for word, partner in zip(names[::2], names[1::2], strict=True):
        phones = WORDS[word]
        assert phones[2:] + phones[:2] == WORDS[partner]
        assert "".join(phones) == word
