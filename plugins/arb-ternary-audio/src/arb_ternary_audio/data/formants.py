"""The built-in sounds: synthetic words made of formants, generated on demand.

Ten words of two syllables, in five pairs that use the same syllables in either order
(``phones.WORDS``). Each is spoken by its own synthetic voice, and the voices of held-out words do
not occur in training. No recordings of people are involved.
"""

from __future__ import annotations

from typing import Final

import attrs
import numpy as np

from arb_ternary.config.options import LARGEST_INT64, Rule, non_negative, option, whole
from arb_ternary_audio.data.decode import as_pcm
from arb_ternary_audio.data.phones import WORDS
from arb_ternary_audio.data.recordings import Recordings
from arb_ternary_audio.data.spectrograms import SpectrogramSource, spectrogram_source, tuning_split
from arb_ternary_audio.features.mel import MelConfig
from arb_ternary_vision.data.source import tuning_option

#: Largest minus smallest signal-to-noise ratio, in decibels.
_NOISE_RANGE: Final = 20.0

# 100,000 words take ten minutes and a gigabyte.
_count = whole(len(WORDS), 100_000)
_decibels = Rule(
    "from -100 to 100", lambda value: -100 <= value <= 100, {"minimum": -100, "maximum": 100}
)


@attrs.frozen(kw_only=True)
class FormantsConfig:
    """Options of the data source ``formants``: synthetic words of 0.8 s at 8 kHz."""

    words: int = option(2000, "number of training words, each with its own voice", validator=_count)
    held_out: int = option(500, "words for validation", validator=_count)
    noise_db: float = option(
        10.0,
        "smallest signal-to-noise ratio of a word, in decibels; the largest is "
        f"{_NOISE_RANGE:g} more",
        validator=_decibels,
    )
    seed: int = option(0, "chooses the voices", validator=non_negative, largest=LARGEST_INT64)
    features: MelConfig = option(help="how spectrograms are computed", factory=MelConfig)
    tuning: bool = tuning_option("word")


def build(config: FormantsConfig) -> SpectrogramSource:
    """Build the data source of ``config``.

    Raises:
        DataError: the features do not fit 8 kHz, or there are too few words for ``tuning``.
    """
    train = synthetic_words(config, 0, config.words)
    if config.tuning:
        train, validation = tuning_split(train)
    else:
        validation = synthetic_words(config, 1, config.held_out)
    return spectrogram_source("formants", train, validation, config.features)


def synthetic_words(config: FormantsConfig, part: int, count: int) -> Recordings:
    """Return ``count`` words; the numbers of words per class differ by at most one.

    Args:
        config: its noise and seed are used.
        part: 0 is training, 1 is validation. Word ``i`` of a part depends only on seed, part and
            ``i``.
        count: number of words.
    """
    from numpy.random import RandomState

    from arb_ternary_audio.data.synthesis import LENGTH, SAMPLE_RATE, speak_word

    noise = (config.noise_db, config.noise_db + _NOISE_RANGE)
    phones = list(WORDS.values())
    samples = np.empty((count, LENGTH), dtype=np.int16)
    for index in range(count):
        random = RandomState([config.seed % 2**32, config.seed >> 32, part, index])
        samples[index] = as_pcm(speak_word(phones[index % len(phones)], random, noise))
    return Recordings(
        samples, np.arange(count, dtype=np.int64) % len(phones), SAMPLE_RATE, tuple(WORDS)
    )
