"""Scaled votes, restated in numpy and Python integers.

The backend suite takes its expected values from here. The functions are written from the rule and
not from any backend, element by element where that is plainest.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from attrs import frozen

from arb_ternary_testing.restatement import (
    Array,
    counter_hash_bits,
    crossings,
    float32,
    group_score,
    int8,
    wide,
)

# Uses of the counter hash, which are added to the stream.
_VOTES: Final = 3
_EXPONENTS: Final = 4
_DECAY: Final = 5
#: Largest value of accumulators of 8, 4 and 2 bits under scaled votes.
LARGEST_VOTE: Final = {8: 127, 4: 7, 2: 1}


@frozen
class Draw:
    """Words of the counter hash from which a kernel draws; ``stream`` is a multiple of 8."""

    seed: int
    step: int
    stream: int

    @property
    def control(self) -> Array:
        """Control words of a module that draws from them: seed, step, stream, micro-batch."""
        step = self.step >> 20
        micro_batch = self.step & (2**20 - 1)
        return np.array([self.seed, step, self.stream // 8, micro_batch], np.int64)

    def bits(self, shape: tuple[int, ...], use: int, start: int = 0) -> Array:
        """Return the hashes of the flat indices of a matrix, from ``start`` on: int64."""
        stream = self.stream + use
        stop = start + math.prod(shape)
        flat = [
            counter_hash_bits(index, self.seed, self.step, stream) for index in range(start, stop)
        ]
        return np.array(flat, np.int64).reshape(shape)


def float_votes(
    gradient_NK: Array,
    vote_scale: Array,
    limit: int,
    draw: Draw,
    noise_shift: int = 0,
) -> Array:
    """Return ``floor(clip((g * row) * column, -L, L) + u)`` in float32 with ``L = limit / 256``.

    A NaN product counts as 0. ``u`` is a multiple of ``2**-24`` in an interval of
    ``2**-noise_shift`` around one half.
    """
    rows = len(gradient_NK)
    row_factors = vote_scale[:rows, None]
    column_factors = vote_scale[None, rows:]
    with np.errstate(over="ignore", invalid="ignore"):
        product = float32(gradient_NK) * row_factors * column_factors
    product = np.where(np.isnan(product), np.float32(0), product)
    bound = np.float32(limit / 256)
    clipped = np.clip(product, -bound, bound)

    width = 2 ** (24 - noise_shift)
    lowest = (2**24 - width) // 2
    bits = draw.bits(gradient_NK.shape, _VOTES)
    noise = lowest + bits // 2 ** (8 + noise_shift)
    uniform = float32(noise) * np.float32(2.0**-24)
    return wide(np.floor(clipped + uniform))


def integer_votes(
    gradient_NK: Array,
    vote_scale: Array,
    power: int,
    limit: int,
    draw: Draw,
) -> Array:
    """Return gradients shifted right by ``row + column - power``, rounded stochastically.

    A negative shift is a shift to the left.
    """
    rows, columns = gradient_NK.shape
    bits = draw.bits(gradient_NK.shape, _VOTES)
    votes = np.zeros((rows, columns), np.int64)
    for n in range(rows):
        for k in range(columns):
            gradient = int(gradient_NK[n, k])
            noise = int(bits[n, k])
            shift = int(vote_scale[n]) + int(vote_scale[rows + k]) - power
            votes[n, k] = _shifted_vote(gradient, shift, limit, noise)
    return votes


def _shifted_vote(gradient: int, shift: int, limit: int, noise: int) -> int:
    """Return a vote for one trit; see :func:`integer_votes`."""
    if shift < 0:
        bound = limit >> 8
        shifted = gradient << min(-shift, 16)
        return min(max(shifted, -bound), bound)
    bits = min(shift, 31)
    bound = (limit << bits) >> 8
    clipped = min(max(gradient, -bound), bound)
    fraction = noise & ((1 << bits) - 1)
    return (clipped + fraction) >> bits


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
    """Return the votes ``A = clip(A - v, -R, R)`` and the exponent votes.

    The vote of an exponent is the group's sum of ``v * T``, shifted right with random rounding.
    """
    largest = LARGEST_VOTE[vote_bits]
    votes = np.clip(wide(votes_NK) - cast_NK, -largest, largest)

    score_NJ = group_score(cast_NK * trits_NK, group_size)
    bits = draw.bits(score_NJ.shape, _EXPONENTS)
    noise = bits & (2**exponent_shift - 1)
    score_NJ = (score_NJ + noise) >> exponent_shift
    exponent_votes = np.clip(wide(exponent_votes_NJ) - score_NJ, -127, 127)

    return int8(votes), int8(exponent_votes)


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
    """Flip trits, then decay the votes that the flips leave in the accumulators.

    ``first_row`` is the index of the first row in the whole weight.

    Returns:
        trits, votes and the number of trits that changed.
    """
    trits = wide(trits_NK)
    votes = wide(votes_NK)
    crossed = crossings(votes, threshold)
    after = np.clip(trits + crossed, -1, 1)
    moved = after != trits
    kept = np.zeros_like(votes)
    if carry:
        at_the_end = np.sign(votes) * (threshold // 2)
        kept = np.where(moved, votes - threshold * crossed, at_the_end)
    votes = np.where(crossed != 0, kept, votes)

    size = np.abs(votes)
    if decay:
        first_index = first_row * votes.shape[1]
        noise = draw.bits(votes.shape, _DECAY, first_index) & 0xFFFF
        lost = (size * decay + noise) >> 16
        size = size - lost
    left = np.sign(votes) * size
    return int8(after), int8(left), int(moved.sum())
