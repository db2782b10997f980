"""Scaled votes once more, in numpy and Python integers: the expected values of the backend suite.

Written from the rule and not from any backend, element by element where that is plainest.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from arb_ternary_testing.restatement import counter_hash_bits, group_score

Array = NDArray[Any]

# : Uses of the counter hash that are added to the stream: rounding of votes, of exponent votes, of
# what decays.
_VOTES = 3
_EXPONENTS = 4
_DECAY = 5
#: Where accumulators of 8, 4 and 2 bits saturate under scaled votes.
LARGEST_VOTE = {8: 127, 4: 7, 2: 1}


@frozen
class Draw:
    """The words of the counter hash that a kernel draws by; ``stream`` is a multiple of 8."""

    seed: int
    step: int
    stream: int

    @property
    def control(self) -> Array:
        """Them as a module's control words: seed, step, stream and micro-batch."""
        return np.array(
            [self.seed, self.step >> 20, self.stream // 8, self.step & (2**20 - 1)], np.int64
        )

    def bits(self, shape: tuple[int, ...], use: int, start: int = 0) -> Array:
        """Hashes of the flat indices of a matrix, from ``start`` on: int64."""
        stream = self.stream + use
        stop = start + math.prod(shape)
        flat = [
            counter_hash_bits(index, self.seed, self.step, stream) for index in range(start, stop)
        ]
        return np.array(flat, np.int64).reshape(shape)


def float_votes(
    gradient_NK: Array, vote_scale: Array, limit: int, draw: Draw, noise_shift: int = 0
) -> Array:
    """``floor(clip((g * row) * column, -L, L) + u)`` in float32 with ``L = limit / 256``; a NaN
    product counts as 0.

    ``u`` is a multiple of ``2**-24`` in an interval of ``2**-noise_shift`` around one half.
    """
    rows = len(gradient_NK)
    with np.errstate(over="ignore", invalid="ignore"):
        product = (gradient_NK.astype(np.float32) * vote_scale[:rows, None]) * vote_scale[
            None, rows:
        ]
    bound = np.float32(limit / 256)
    clipped = np.clip(np.where(np.isnan(product), np.float32(0), product), -bound, bound)
    whole = 2**24
    width = 2 ** (24 - noise_shift)
    noise = (whole - width) // 2 + draw.bits(gradient_NK.shape, _VOTES) // 2 ** (8 + noise_shift)
    uniform = noise.astype(np.float32) * np.float32(2.0**-24)
    result: Array = np.floor(clipped + uniform).astype(np.int64)
    return result


def integer_votes(
    gradient_NK: Array, vote_scale: Array, power: int, limit: int, draw: Draw
) -> Array:
    """A stochastic shift to the right by ``row + column - power``, or a shift to the left where
    that is negative.
    """
    rows, columns = gradient_NK.shape
    bits = draw.bits(gradient_NK.shape, _VOTES)
    votes = np.zeros((rows, columns), np.int64)
    for n in range(rows):
        for k in range(columns):
            g = int(gradient_NK[n, k])
            shift = int(vote_scale[n]) + int(vote_scale[rows + k]) - power
            if shift >= 0:
                shift = min(shift, 31)
                bound = (limit << shift) >> 8
                votes[n, k] = (
                    min(max(g, -bound), bound) + (int(bits[n, k]) & (2**shift - 1))
                ) >> shift
            else:
                bound = limit >> 8
                votes[n, k] = min(max(g << min(-shift, 16), -bound), bound)
    return votes


def cast_scaled_votes(
    cast_NK: Array,
    trits_NK: Array,
    votes_NK: Array,
    exponent_votes_NJ: Array,
    group_size: int,
    *,
    vote_bits: int,
    exponent_shift: int,
    draw: Draw,
) -> tuple[Array, Array]:
    """``A = clip(A - v, -R, R)``, and ``B`` less the group's sum of ``v * T``, shifted right with
    random rounding.
    """
    score_NJ = group_score(cast_NK * trits_NK, group_size)
    noise = draw.bits(score_NJ.shape, _EXPONENTS) & (2**exponent_shift - 1)
    largest = LARGEST_VOTE[vote_bits]
    votes = np.clip(votes_NK.astype(np.int64) - cast_NK, -largest, largest)
    exponent_votes = exponent_votes_NJ.astype(np.int64) - ((score_NJ + noise) >> exponent_shift)
    return votes.astype(np.int8), np.clip(exponent_votes, -127, 127).astype(np.int8)


def apply_scaled_votes(
    trits_NK: Array,
    votes_NK: Array,
    threshold: int,
    decay: int,
    *,
    carry: bool,
    draw: Draw,
    first_row: int = 0,
) -> tuple[Array, Array, int]:
    """Flips, what they leave in the accumulators, and the decay of those; ``first_row`` of the
    whole weight.

    Returns:
        trits, votes and the number of trits that changed.
    """
    trits = trits_NK.astype(np.int64)
    votes = votes_NK.astype(np.int64)
    crossed = (votes >= threshold).astype(np.int64) - (votes <= -threshold).astype(np.int64)
    after = np.clip(trits + crossed, -1, 1)
    moved = after != trits
    if carry:
        kept = np.where(moved, votes - threshold * crossed, np.sign(votes) * (threshold // 2))
    else:
        kept = np.zeros_like(votes)
    votes = np.where(crossed != 0, kept, votes)
    noise = draw.bits(votes.shape, _DECAY, first_row * votes.shape[1]) & 0xFFFF
    size = np.abs(votes)
    size -= (size * decay + noise) >> 16 if decay else 0
    return after.astype(np.int8), (np.sign(votes) * size).astype(np.int8), int(moved.sum())
