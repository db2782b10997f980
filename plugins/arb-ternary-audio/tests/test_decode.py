"""Reading sound files, resampling, and faults of files."""

import numpy as np
import pytest
import soundfile

from arb_ternary.errors import DataError
from arb_ternary_audio.data.decode import as_pcm, read_sound, resample


@pytest.mark.parametrize("suffix", ["wav", "flac"])
def test_read_sound_returns_the_samples(tmp_path, suffix):
    wave = np.random.default_rng(0).uniform(-1, 1, 800)
    path = tmp_path / f"a.{suffix}"
    soundfile.write(path, wave, 8000, subtype="PCM_16")
    np.testing.assert_allclose(read_sound(path, 8000, 1.0), wave, atol=1 / 32768)


def test_channels_are_averaged(tmp_path):
    both = np.stack([np.full(100, 0.5), np.full(100, -0.25)], axis=1)
    soundfile.write(tmp_path / "a.wav", both, 8000, subtype="FLOAT")
    np.testing.assert_array_equal(read_sound(tmp_path / "a.wav", 8000, 1.0), np.full(100, 0.125))


@pytest.mark.parametrize("rate", [16000, 44100, 6000])
def test_resample_keeps_a_tone(rate):
    wave = np.sin(2 * np.pi * 440 * np.arange(rate) / rate)
    found = resample(wave, rate, 8000)
    expected = np.sin(2 * np.pi * 440 * np.arange(8000) / 8000)
    assert len(found) == 8000
    np.testing.assert_allclose(found[400:-400], expected[400:-400], atol=2e-3)


def test_resample_removes_higher_frequencies():
    wave = np.sin(2 * np.pi * 6000 * np.arange(16000) / 16000)
    assert np.abs(resample(wave, 16000, 8000)[400:-400]).max() < 0.01


def test_longer_sound_is_an_error_or_cut(tmp_path):
    wave = np.linspace(-0.5, 0.5, 1000)
    soundfile.write(tmp_path / "a.wav", wave, 8000)
    with pytest.raises(DataError, match=r"a\.wav: 0\.12 s, and a sample has 0\.1 s"):
        read_sound(tmp_path / "a.wav", 8000, 0.1)
    np.testing.assert_allclose(
        read_sound(tmp_path / "a.wav", 8000, 0.1, "cut"), wave[:800], atol=1e-4
    )


def _garbage(path):
    path.write_bytes(b"RIFF" + bytes(40))


def _truncated(path):
    soundfile.write(path, np.zeros(1000), 8000)
    path.write_bytes(path.read_bytes()[:30])


def _empty(path):
    soundfile.write(path, np.zeros(0), 8000)


def _header_only(path):
    """Write a header that claims samples, and no samples."""
    soundfile.write(path, np.zeros(1000), 8000)
    path.write_bytes(path.read_bytes()[:44])


def _not_finite(path):
    soundfile.write(path, np.array([0.0, np.nan]), 8000, subtype="FLOAT")


def _odd(path):
    soundfile.write(path, np.zeros(100), 7993)


def _slow(path):
    soundfile.write(path, np.zeros(100), 10)


def _missing(path):
    pass


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_garbage, "cannot be read"),
        (_truncated, "cannot be read|is empty"),
        (_empty, "the sound is empty"),
        (_header_only, "is empty|holds none"),
        (_not_finite, "sample 1 is not a finite number"),
        (_odd, "7993 Hz cannot be resampled to 8000 Hz"),
        (_slow, "10 Hz and 1 channels"),
        (_missing, "cannot be read"),
    ],
)
def test_read_sound_names_the_fault(tmp_path, damage, words):
    path = tmp_path / "bad.wav"
    damage(path)
    with pytest.raises(DataError, match=rf"bad\.wav: .*({words})"):
        read_sound(path, 8000, 1.0)


def test_pcm_rounds_and_clips():
    assert as_pcm(np.array([0.0, 1.0, 2.0, -2.0, 1.4 / 32768, -1.6 / 32768])).tolist() == [
        0,
        32767,
        32767,
        -32768,
        1,
        -2,
    ]
