"""The phones of the synthetic words: what excites the vocal tract, and its resonances.

Formants of the vowels are the means of 33 men in Peterson and Barney, *Control methods used in a
study of the vowels* (1952), table II. Formants of the nasals, and the noise of fricatives and
bursts, are round numbers near those of Klatt, *Software for a cascade/parallel formant synthesizer*
(1980), tables II and III. The sample rate of 8 kHz cuts them off at 4 kHz.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from attrs import frozen


@frozen
class Segment:
    """A stretch of sound.

    Attributes:
        milliseconds: duration in a word of medium pace.
        voice: amplitude of the pulses of the vocal folds.
        noise: amplitude of the turbulence.
        formants: the first three, in Hz; of a segment without voice, those that the tract moves
            to.
        noise_at: centre of the noise, in Hz.
        noise_width: one standard deviation of its spectrum, in Hz.
    """

    milliseconds: float
    voice: float = 0.0
    noise: float = 0.0
    formants: tuple[float, float, float] = (500.0, 1500.0, 2500.0)
    noise_at: float = 2000.0
    noise_width: float = 500.0


def _vowel(first: float, second: float, third: float) -> tuple[Segment, ...]:
    return (Segment(130.0, voice=1.0, formants=(first, second, third)),)


def _nasal(second: float) -> tuple[Segment, ...]:
    return (Segment(70.0, voice=0.25, formants=(270.0, second, 2200.0)),)


def _fricative(at: float, width: float, loud: float) -> tuple[Segment, ...]:
    return (Segment(100.0, noise=loud, noise_at=at, noise_width=width),)


def _stop(at: float, width: float, loud: float) -> tuple[Segment, ...]:
    return (Segment(55.0), Segment(18.0, noise=loud, noise_at=at, noise_width=width))


#: Segments of each phone.
PHONES: Final = MappingProxyType(
    {
        "i": _vowel(270, 2290, 3010),
        "e": _vowel(530, 1840, 2480),
        "a": _vowel(730, 1090, 2440),
        "o": _vowel(570, 840, 2410),
        "u": _vowel(300, 870, 2240),
        "m": _nasal(1000),
        "n": _nasal(1500),
        "s": _fricative(3400, 450, 0.30),
        "sh": _fricative(2500, 500, 0.40),
        "f": _fricative(2200, 1600, 0.12),
        "p": _stop(900, 700, 0.30),
        "t": _stop(3500, 600, 0.45),
        "k": _stop(1900, 350, 0.45),
    }
)

#: The words, by name. They come in pairs of the same two syllables in either order, so that only
#: the order of the sounds tells a word from its partner.
WORDS: Final = MappingProxyType(
    {
        "masi": ("m", "a", "s", "i"),
        "sima": ("s", "i", "m", "a"),
        "tuke": ("t", "u", "k", "e"),
        "ketu": ("k", "e", "t", "u"),
        "nofa": ("n", "o", "f", "a"),
        "fano": ("f", "a", "n", "o"),
        "shiko": ("sh", "i", "k", "o"),
        "koshi": ("k", "o", "sh", "i"),
        "pemu": ("p", "e", "m", "u"),
        "mupe": ("m", "u", "p", "e"),
    }
)
