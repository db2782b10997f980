"""Reading sound files, resampling, and faults of files."""

import struct
import wave as wave_module
from pathlib import Path

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
    found = resample(Path("x.wav"), wave, rate, 8000)
    expected = np.sin(2 * np.pi * 440 * np.arange(8000) / 8000)
    assert len(found) == 8000
    np.testing.assert_allclose(found[400:-400], expected[400:-400], atol=2e-3)


def test_resample_removes_higher_frequencies():
    wave = np.sin(2 * np.pi * 6000 * np.arange(16000) / 16000)
    assert np.abs(resample(Path("x.wav"), wave, 16000, 8000)[400:-400]).max() < 0.01


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


def _write_wav(path, samples_LC):
    """Write 16-bit samples ``[L, C]`` with the standard library."""
    with wave_module.open(str(path), "wb") as file:
        file.setnchannels(samples_LC.shape[1])
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes(samples_LC.astype("<i2").tobytes())


def _tone(hertz, amplitude=0.5):
    return amplitude * np.sin(2 * np.pi * hertz * np.arange(1000) / 8000)


@pytest.mark.parametrize("subtype", ["FLOAT", "DOUBLE"])
@pytest.mark.parametrize("amplitude", [30.0, 20_000.0])
def test_floats_in_the_range_of_16_bit_integers_are_refused(tmp_path, subtype, amplitude):
    path = tmp_path / "loud.wav"
    soundfile.write(path, np.rint(_tone(440, amplitude)), 8000, subtype=subtype)
    with pytest.raises(DataError, match=r"loud\.wav: samples reach .* 16-bit integers") as caught:
        read_sound(path, 8000, 1.0)
    assert "volume=1/32768" in caught.value.hint


def test_floats_beyond_16_bit_integers_are_refused(tmp_path):
    soundfile.write(tmp_path / "loud.wav", _tone(440, 2.0**23), 8000, subtype="FLOAT")
    with pytest.raises(
        DataError, match=r"loud\.wav: samples reach 8\.\d+e\+06, and full scale is 1"
    ):
        read_sound(tmp_path / "loud.wav", 8000, 1.0)


def test_floats_a_little_beyond_full_scale_are_read(tmp_path):
    soundfile.write(tmp_path / "a.wav", _tone(440, 1.5), 8000, subtype="DOUBLE")
    np.testing.assert_array_equal(read_sound(tmp_path / "a.wav", 8000, 1.0), _tone(440, 1.5))


@pytest.mark.parametrize("other", [-1.0, -0.95])
@pytest.mark.parametrize("offset", [0.0, 0.1])
def test_channels_that_cancel_out_are_refused(tmp_path, other, offset):
    both = np.stack([_tone(440), other * _tone(440)], axis=1) + offset
    _write_wav(tmp_path / "anti.wav", 32767 * both)
    with pytest.raises(DataError, match=r"anti\.wav: the channels cancel out") as caught:
        read_sound(tmp_path / "anti.wav", 8000, 1.0)
    assert "pan=mono" in caught.value.hint


def test_channels_that_are_quiet_and_cancel_out_are_refused(tmp_path):
    left = np.rint(_tone(440, 20))
    _write_wav(tmp_path / "anti.wav", np.stack([left, -left], axis=1))
    with pytest.raises(DataError, match=r"anti\.wav: the channels cancel out"):
        read_sound(tmp_path / "anti.wav", 8000, 1.0)


@pytest.mark.parametrize(
    "channels",
    [
        [np.zeros(1000), np.zeros(1000)],
        [np.full(1000, 8000), np.full(1000, -8000)],
        [32767 * _tone(440), 32767 * _tone(660)],
        [32767 * _tone(440), np.zeros(1000)],
        [32767 * _tone(440), -16383 * _tone(440)],
        [32767 * _tone(440), *[np.zeros(1000)] * 31],
    ],
    ids=["silence", "constants", "two tones", "one silent", "one louder", "31 silent"],
)
def test_channels_that_do_not_cancel_out_are_averaged(tmp_path, channels):
    samples_LC = np.rint(np.stack(channels, axis=1))
    _write_wav(tmp_path / "a.wav", samples_LC)
    np.testing.assert_allclose(
        read_sound(tmp_path / "a.wav", 8000, 1.0), samples_LC.mean(axis=1) / 32768, atol=1e-12
    )


@pytest.mark.parametrize("longer", ["error", "cut"])
@pytest.mark.parametrize("extra", [b"", b"LIST" + struct.pack("<I", 3) + b"abc\0"])
def test_wav_that_is_cut_off_is_refused(tmp_path, longer, extra):
    path = tmp_path / "cut.wav"
    _write_wav(path, 32767 * _tone(440)[:, None])
    whole = path.read_bytes()
    # The samples begin after 44 bytes; before them may be chunks of other kinds, of odd sizes.
    path.write_bytes(whole[:36] + extra + whole[36 : 44 + 250])
    with pytest.raises(
        DataError,
        match=r"cut\.wav: the header promises 2000 bytes of samples, and the file holds 250",
    ):
        read_sound(path, 8000, 0.01 if longer == "cut" else 1.0, longer)


@pytest.mark.parametrize("size", [0xFFFFFFFF, 0x7FFFF000])
def test_wav_of_unknown_size_is_read(tmp_path, size):
    """Programs that write to a pipe put such a size in the header."""
    path = tmp_path / "piped.wav"
    samples = np.rint(32767 * _tone(440))
    _write_wav(path, samples[:, None])
    whole = bytearray(path.read_bytes())
    whole[40:44] = struct.pack("<I", size)
    path.write_bytes(whole)
    np.testing.assert_array_equal(read_sound(path, 8000, 1.0), samples / 32768)


def test_chunks_after_the_samples_do_not_matter(tmp_path):
    path = tmp_path / "a.wav"
    samples = np.rint(32767 * _tone(440))
    _write_wav(path, samples[:, None])
    path.write_bytes(path.read_bytes() + b"LIST" + struct.pack("<I", 1000) + b"cut off")
    np.testing.assert_array_equal(read_sound(path, 8000, 1.0), samples / 32768)
