"""The built-in sounds: synthetic words made of formants, generated on demand.

Ten words of two syllables, in five pairs that use the same syllables in either order
(``phones.WORDS``). Each is spoken by its own synthetic voice, and the voices of held-out words do
not occur in training. No recordings of people are involved.
"""

from __future__ import annotations

from typing import Final

import attrs
import numpy as np

from arb_ternary.config.options import Rule, option
from arb_ternary_audio.data.phones import WORDS
from arb_ternary_audio.data.recordings import Recordings, as_pcm
from arb_ternary_audio.data.spectrograms import SpectrogramSource, spectrogram_source, tuning_split
from arb_ternary_audio.features.mel import MelConfig

#: Range of the signal-to-noise ratio, in decibels.
_SPREAD: Final = 20.0

# 100,000 words take ten minutes and a gigabyte.
_count = Rule(
    f"a whole number from {len(WORDS)} to 100000",
    lambda value: type(value) is int and len(WORDS) <= value <= 100_000,
    {"minimum": len(WORDS), "maximum": 100_000},
)
_decibels = Rule(
    "from -100 to 100", lambda value: -100 <= value <= 100, {"minimum": -100, "maximum": 100}
)
_seed = Rule(
    "a whole number from 0 to 2^64 - 1",
    lambda value: type(value) is int and 0 <= value < 1 << 64,
    {"minimum": 0},
)


@attrs.frozen(kw_only=True)
class FormantsConfig:
    """Options of the data source ``formants``: synthetic words of 0.8 s at 8 kHz."""

    words: int = option(2000, "number of training words, each with its own voice", validator=_count)
    held_out: int = option(500, "words for validation", validator=_count)
    noise_db: float = option(
        10.0,
        f"by how many decibels a word is louder than the noise around it, at least; at most "
        f"{_SPREAD:g} more",
        validator=_decibels,
    )
    seed: int = option(0, "chooses the voices", validator=_seed)
    features: MelConfig = option(help="how spectrograms are computed", factory=MelConfig)
    tuning: bool = option(
        False,
        "choose settings with this: validate on a fifth of the training words and train on the "
        "rest; the held-out words stay unseen",
        validator=attrs.validators.instance_of(bool),
    )


def build(config: FormantsConfig) -> SpectrogramSource:
    """Build the data source of ``config``.

    Raises:
        DataError: the features do not fit 8 kHz, or there are too few words for ``tuning``.
    """
    train = synthetic_words(config, 0, config.words)
    train, validation = (
        tuning_split(train)
        if config.tuning
        else (train, synthetic_words(config, 1, config.held_out))
    )
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

    from arb_ternary_audio.data.synthesis import LENGTH, SAMPLE_RATE, say

    noise = (config.noise_db, config.noise_db + _SPREAD)
    phones = list(WORDS.values())
    samples = np.empty((count, LENGTH), dtype=np.int16)
    for index in range(count):
        random = RandomState([config.seed % 2**32, config.seed >> 32, part, index])
        samples[index] = as_pcm(say(phones[index % len(phones)], random, noise))
    return Recordings(
        samples, np.arange(count, dtype=np.int64) % len(phones), SAMPLE_RATE, tuple(WORDS)
    )
