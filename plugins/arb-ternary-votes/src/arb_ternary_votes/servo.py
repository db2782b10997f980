"""The threshold of a module, controlled so that the right share of its trits flips.

All arithmetic is on integers.

A threshold is kept as a *level*, a logarithm in units of 1/4096 of a factor of two with a linear
mantissa::

    theta = (4096 + level mod 4096) * 2**(level div 4096) / 4096

so that whole thresholds have exact levels, and 1..127 are the levels 0..28608, which an int16
holds. A step uses a whole number: ``theta`` is rounded up or down in turn by a Weyl sequence of the
step, in proportion to its fraction, because the next whole threshold of a narrow accumulator may be
half as likely to be crossed.

After a step with ``f`` flips among ``n`` trits and a target share ``t``, rounded to a multiple of
2**-32::

    e     = min(round(256 * f / (n * t)), 8 * 256) - 256            # relative error, in 256ths
    level = clip(level + (round(4096 * gain) * e + 128 >> 8), 0,
        level of R)      where |e| > round(256 * dead_band)

The error is linear in the number of flips, not in its logarithm, so the mean share is the target
even if most steps have no flip at all.
"""

from __future__ import annotations

from typing import Final

#: Levels per factor of two.
FRACTION: Final = 4096
_FRACTION_BITS: Final = 12
#: ``2**16`` over the golden ratio: its multiples modulo 2**16 are spread most evenly.
_WEYL: Final = 40503
#: Largest number of flips that counts, as a multiple of the target.
_MOST: Final = 8


def level_of(threshold: int) -> int:
    """Return the level of a whole threshold, 1..4096."""
    octave = threshold.bit_length() - 1
    return (octave << _FRACTION_BITS) + ((threshold << _FRACTION_BITS) >> octave) - FRACTION


def exact_threshold(level: int) -> int:
    """Return the threshold of a level in units of 2**-16."""
    return ((FRACTION + level % FRACTION) << (16 - _FRACTION_BITS)) << (level // FRACTION)


def whole_threshold(level: int, step: int, largest: int) -> int:
    """Return the threshold of optimizer step ``step``: a whole number next to that of ``level``."""
    return min(largest, (exact_threshold(level) + (step * _WEYL & 0xFFFF)) >> 16)


def next_level(
    level: int,
    flips: int,
    elements: int,
    share: float,
    *,
    gain: float,
    dead_band: float,
    largest: int,
) -> int:
    """Return the level after a step.

    Args:
        level: level of the step.
        flips: trits that changed in the step.
        elements: trits of the module, at least 1.
        share: share of the trits that should have changed, in (0, 1].
        gain: octaves for a relative error of 1.
        dead_band: relative error that is tolerated.
        largest: largest threshold.
    """
    wanted = elements * max(1, round(share * 2.0**32))
    error = min(((flips << 40) + wanted // 2) // wanted, _MOST << 8) - 256
    if abs(error) <= round(256 * dead_band):
        return level
    moved = level + ((error * round(gain * FRACTION) + 128) >> 8)
    return min(max(moved, 0), level_of(largest))
