"""Synthesise words: pulses and noise, filtered frame by frame by the resonances of a vocal tract.

Every word has its own voice. Pitch and its fall, length of the tract (which scales all formants),
formants, pace, loudness, start and background noise are drawn anew. The words sound like a speaking
machine of the 1950s; they are not recordings of people.

Random numbers come from numpy's ``RandomState``, whose streams are frozen. The same index is
therefore the same word in every release of numpy, up to rounding of the 16-bit samples.

Shapes: ``L`` samples, ``T`` frames, ``F`` frequencies of a frame.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from attrs import frozen
from numpy.random import RandomState
from numpy.typing import NDArray

from arb_ternary_audio.data.phones import PHONES, Segment

Floats = NDArray[np.float64]

SAMPLE_RATE: Final = 8000
#: Samples of a word with the silence around it: 0.8 s.
LENGTH: Final = 6400
#: Samples from one frame to the next. A frame is twice as long and is padded to four times.
_HOP: Final = 80
_PADDED: Final = 4 * _HOP
_FREQUENCIES: Final = np.arange(_PADDED // 2 + 1) * (SAMPLE_RATE / _PADDED)
#: Bandwidths in Hz of the first three formants and of a fixed fourth (near those of Klatt, 1980).
_BANDWIDTHS: Final = (70.0, 100.0, 140.0, 220.0)
_FOURTH: Final = 3500.0


@frozen
class Voice:
    """A voice, and how it speaks a word.

    Attributes:
        pitch: Hz at the beginning of a word.
        fall: fraction of the pitch that is lost by its end; negative if it rises.
        tract: factor of all formants; a short tract is a child's.
        colour: factor of each of the four formants.
        pace: factor of the duration of each segment.
        strength: factor of the amplitude of each segment.
    """

    pitch: float
    fall: float
    tract: float
    colour: Floats
    pace: Floats
    strength: Floats


def draw_voice(random: RandomState, segments: int) -> Voice:
    """Draw a voice for a word of ``segments`` segments."""
    return Voice(
        pitch=90.0 * 2.0 ** (1.4 * random.random_sample()),
        fall=-0.1 + 0.4 * random.random_sample(),
        tract=0.87 * 1.4 ** random.random_sample(),
        colour=1.0 + 0.06 * (2.0 * random.random_sample(4) - 1.0),
        pace=(0.75 + 0.5 * random.random_sample()) * (0.75 + 0.5 * random.random_sample(segments)),
        strength=0.5 + random.random_sample(segments),
    )


def speak_word(phones: Sequence[str], random: RandomState, noise_db: tuple[float, float]) -> Floats:
    """Speak the phones in a random voice: float64 ``[LENGTH]`` in [-1, 1].

    Args:
        phones: names in ``PHONES``.
        random: source of all randomness.
        noise_db: smallest and largest signal-to-noise ratio, in decibels.
    """
    segments = [segment for phone in phones for segment in PHONES[phone]]
    word = speak_segments(segments, draw_voice(random, len(segments)), random)
    start = int(random.random_sample() * (LENGTH - len(word)))
    sound = np.zeros(LENGTH)
    sound[start : start + len(word)] = word
    ratio_db = noise_db[0] + (noise_db[1] - noise_db[0]) * random.random_sample()
    loudness = np.sqrt(np.mean(word**2))
    sound += _background(random) * (loudness * 10.0 ** (-ratio_db / 20.0))
    level = 0.1 + 0.8 * random.random_sample()
    return np.asarray(level * sound / np.abs(sound).max())


def speak_segments(segments: Sequence[Segment], voice: Voice, random: RandomState) -> Floats:
    """Speak the segments, without surrounding silence or noise: float64, at most 95 % of
    ``LENGTH``.

    ``random`` gives the turbulence and the phase of the vibrato.
    """
    milliseconds = np.array([segment.milliseconds for segment in segments])
    lengths = milliseconds * voice.pace * (SAMPLE_RATE / 1000.0)
    lengths *= min(1.0, 0.95 * LENGTH / lengths.sum())
    length = int(lengths.sum())
    tracks = _tracks(segments, voice, lengths, -(-length // _HOP) + 1)
    pulses, noise = _excite(tracks, voice, random)
    return _filter(pulses, noise, tracks)[:length]


@frozen
class _Tracks:
    """State of the tract per frame: ``voice`` and ``noise`` ``[T]``, their responses ``[T, F]``."""

    voice: Floats
    noise: Floats
    resonance: Floats
    turbulence: Floats


def _tracks(segments: Sequence[Segment], voice: Voice, lengths: Floats, frames: int) -> _Tracks:
    """Compute the state of the tract in each frame from segments of ``lengths`` samples."""
    centres = np.cumsum(lengths) - lengths / 2.0
    ends = np.cumsum(lengths)
    at = np.arange(frames) * float(_HOP)
    # Amplitudes change within a frame or two. Formants glide from the middle of one segment to the
    # middle of the next.
    which = np.minimum(np.searchsorted(ends, at, side="right"), len(segments) - 1)
    loud = np.array([[each.voice, each.noise] for each in segments]) * voice.strength[:, None]
    amplitudes = _smooth(loud[which])
    amplitudes[at >= ends[-1]] = 0.0
    places = np.array([[*each.formants, _FOURTH] for each in segments]) * voice.colour * voice.tract
    glides = np.stack([np.interp(at, centres, places[:, i]) for i in range(4)], axis=1)
    # Pulses of the vocal folds lose 12 dB per octave, and the mouth gives 6 back.
    below = np.tile(1.0 + (_FREQUENCIES / 300.0) ** 2, (frames, 1))
    for i, width in enumerate(_BANDWIDTHS):
        square = _FREQUENCIES / glides[:, i : i + 1]
        square *= square
        below *= (1.0 - square) ** 2 + square * (width / glides[:, i : i + 1]) ** 2
    middle = np.array([each.noise_at for each in segments])[which, None] * voice.tract**0.5
    wide = np.array([each.noise_width for each in segments])[which, None]
    turbulence = np.exp(-0.5 * ((_FREQUENCIES - middle) / wide) ** 2)
    return _Tracks(amplitudes[:, 0], amplitudes[:, 1], below**-0.5, turbulence)


def _smooth(values: Floats) -> Floats:
    padded = np.pad(values, ((1, 1), (0, 0)), mode="edge")
    return np.asarray(0.25 * padded[:-2] + 0.5 * padded[1:-1] + 0.25 * padded[2:])


def _excite(tracks: _Tracks, voice: Voice, random: RandomState) -> tuple[Floats, Floats]:
    """Return pulses at the pitch and white noise, ``[T * _HOP]`` each, both with power 1."""
    length = len(tracks.voice) * _HOP
    pitch = voice.pitch * (1.0 - voice.fall * np.arange(length) / length)
    vibrato = 5.0 * np.arange(length) / SAMPLE_RATE + random.random_sample()
    pitch *= 1.0 + 0.01 * np.sin(2.0 * np.pi * vibrato)
    turns = np.floor(np.cumsum(pitch / SAMPLE_RATE))
    pulses = np.diff(turns, prepend=0.0) * np.sqrt(SAMPLE_RATE / pitch)
    return pulses, np.asarray(random.standard_normal(length))


def _filter(pulses: Floats, noise: Floats, tracks: _Tracks) -> Floats:
    """Filter the sources by the tract: Hann windows that add up to 1, one response per frame."""
    frames = len(tracks.voice)
    window = 0.5 - 0.5 * np.cos(np.pi * np.arange(2 * _HOP) / _HOP)
    spectrum: NDArray[Any] = np.zeros((frames, len(_FREQUENCIES)), dtype=np.complex128)
    for source, amplitude, response in (
        (pulses, tracks.voice, tracks.resonance),
        (noise, tracks.noise, tracks.turbulence),
    ):
        pieces = np.concatenate((np.zeros(_HOP), source)).reshape(frames + 1, _HOP)
        cut = np.zeros((frames, _PADDED))
        cut[:, _HOP : 2 * _HOP] = pieces[:-1]
        cut[:, 2 * _HOP : 3 * _HOP] = pieces[1:]
        cut[:, _HOP : 3 * _HOP] *= window
        spectrum += np.fft.rfft(cut, axis=1) * (response * amplitude[:, None])
    filtered = np.fft.irfft(spectrum, n=_PADDED, axis=1).reshape(frames, 4, _HOP)
    total = np.zeros((frames + 3, _HOP))
    for quarter in range(4):
        total[quarter : quarter + frames] += filtered[:, quarter]
    return total[2:].reshape(-1)


def _background(random: RandomState) -> Floats:
    """Return coloured noise of power 1, ``[LENGTH]``: the background noise of a room."""
    tilt = random.random_sample() * 1.5
    spectrum = np.fft.rfft(random.standard_normal(LENGTH))
    spectrum *= (np.arange(len(spectrum)) + 20.0) ** (-tilt / 2.0)
    noise = np.fft.irfft(spectrum, n=LENGTH)
    return np.asarray(noise / np.sqrt(np.mean(noise**2)))
