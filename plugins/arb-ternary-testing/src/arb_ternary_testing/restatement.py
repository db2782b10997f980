"""The number format and its updates, restated in numpy and Python integers.

The suites take their expected values from here. The functions are written from the rules and not
from any backend, with the plainest arithmetic that gives the exact result.

Shapes: ``M`` rows, ``K`` input features, ``N`` output features, ``G`` group size, ``J = ceil(K /
G)``.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

#: Unit roundoff of float32: half the distance from 1 to the next number.
FLOAT32_ROUNDOFF: Final = 2.0**-24
#: Smallest and largest value of accumulators of 8, 4 and 2 bits under sign votes.
VOTE_RANGES: Final = {8: (-128, 127), 4: (-7, 7), 2: (-1, 1)}
_MASK64: Final = (1 << 64) - 1
_MASK32: Final = (1 << 32) - 1


def wide(values: Any) -> Array:
    """Return integers as int64."""
    result: Array = values.astype(np.int64)
    return result


def groups(columns: int, group_size: int) -> int:
    """Return ``J``, the number of exponents per row."""
    return -(-columns // group_size)


def spread(values_NJ: Array, columns: int, group_size: int) -> Array:
    """Repeat the value of each group over the group's columns: ``[N, J]`` to ``[N, K]``."""
    return values_NJ[:, np.arange(columns) // group_size]


def pack_base3(trits_NK: Array) -> Array:
    """Return the at-rest form: ``byte = sum((t_i + 1) * 3**i)`` over five trits.

    Rows are padded with ``t = 0``.
    """
    rows, columns = trits_NK.shape
    width = groups(columns, 5)
    padded = np.pad(trits_NK, ((0, 0), (0, 5 * width - columns)))
    digits = padded.reshape(rows, width, 5) + 1
    powers = np.array([1, 3, 9, 27, 81])
    packed: Array = (digits * powers).sum(axis=2).astype(np.uint8)
    return packed


def dense_weight(trits_NK: Array, exponent_NJ: Array, group_size: int) -> Array:
    """Return ``T * 2**E`` in float64, exact."""
    scale_NJ = np.exp2(exponent_NJ.astype(np.float64))
    return trits_NK.astype(np.float64) * spread(scale_NJ, trits_NK.shape[1], group_size)


def quantize_rows(x_MK: Array) -> tuple[Array, Array]:
    """Return ``q = round_half_even(x / s)`` and ``s = max|x| / 127`` in float32.

    Rows of zeros give zeros.
    """
    x = x_MK.astype(np.float32)
    largest = np.abs(x).max(axis=1, initial=0.0)
    scale = (largest / np.float32(127)).astype(np.float32)
    divisor = scale[:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        quotient = np.where(divisor == 0, np.float32(0), x / divisor)
    return np.rint(quotient).astype(np.int8), scale


def _exact_product(left_MK: Array, right_KN: Array) -> Array:
    """Return an integer matrix product that cannot overflow.

    It is computed in int64 if that is large enough, and in Python integers otherwise.
    """
    terms = left_MK.shape[1]
    if terms == 0:
        return np.zeros((left_MK.shape[0], right_KN.shape[1]), np.int64)
    largest_left = int(np.abs(left_MK).max(initial=0))
    largest_right = int(np.abs(right_KN).max(initial=0))
    fits = largest_left * largest_right * terms < 2**62
    kind: Any = np.int64 if fits else object
    result: Array = left_MK.astype(kind) @ right_KN.astype(kind)
    return result


def _to_float32(integers: Array) -> Array:
    """Return integers as float32, rounded once to nearest even."""
    return wide(integers).astype(np.float32)


def _shifted(trits_NK: Array, shift_NK: Array) -> Array:
    largest = int(shift_NK.max(initial=0))
    kind: Any = np.int64 if largest < 60 else object
    result: Array = trits_NK.astype(kind) << shift_NK.astype(kind)
    return result


def linear_int8(
    q_MK: Array,
    scale_M: Array,
    trits_NK: Array,
    exponent_NJ: Array,
    group_size: int,
    bias_N: Array | None = None,
) -> Array:
    """Return ``float32(sum_g acc_g << (E_g - Emin)) * scale * 2**Emin (+ bias)``.

    Each operation is rounded once.
    """
    rows, columns = trits_NK.shape
    exponent = wide(exponent_NJ)
    floor_N = np.zeros(rows, np.int64)
    if exponent.shape[1]:
        floor_N = exponent.min(axis=1, initial=127)
    shift_NK = spread(exponent - floor_N[:, None], columns, group_size)

    weight_NK = _shifted(trits_NK, shift_NK)
    acc_MN = _exact_product(q_MK, weight_NK.T)

    unit_N = np.exp2(floor_N).astype(np.float32)
    y_MN = _to_float32(acc_MN)
    y_MN = y_MN * scale_M.astype(np.float32)[:, None]
    y_MN = y_MN * unit_N
    if bias_N is not None:
        y_MN = y_MN + bias_N.astype(np.float32)
    return y_MN


def linear_int8_grad_input(
    q_MN: Array,
    scale: float,
    trits_NK: Array,
    exponent_NJ: Array,
    group_size: int,
) -> Array:
    """Return ``grad_y @ W`` of an int8 gradient.

    It is summed in units of the smallest exponent of each column group.
    """
    columns = trits_NK.shape[1]
    exponent = wide(exponent_NJ)
    floor_J = exponent.min(axis=0, keepdims=True)
    shift_NK = spread(exponent - floor_J, columns, group_size)

    weight_NK = _shifted(trits_NK, shift_NK)
    acc_MK = _exact_product(q_MN, weight_NK)

    unit_J = np.exp2(floor_J).astype(np.float32)
    unit_K = spread(unit_J, columns, group_size)
    grad_MK = _to_float32(acc_MK) * np.float32(scale)
    return grad_MK * unit_K


def group_score(values_NK: Array, group_size: int) -> Array:
    """Sum over the columns of each group: ``[N, K]`` to int64 ``[N, J]``."""
    rows, columns = values_NK.shape
    score_NJ = np.zeros((rows, groups(columns, group_size)), np.int64)
    for group in range(score_NJ.shape[1]):
        start = group * group_size
        score_NJ[:, group] = wide(values_NK[:, start : start + group_size]).sum(axis=1)
    return score_NJ


def _saturate(values: Array, bits: int = 8) -> Array:
    return np.clip(values, *VOTE_RANGES[bits]).astype(np.int8)


def cast_votes(
    gradient_NK: Array,
    trits_NK: Array,
    votes_NK: Array,
    exponent_votes_NJ: Array,
    group_size: int,
    vote_bits: int = 8,
) -> tuple[Array, Array]:
    """Return ``A = sat(A - s)`` and ``B = sat8(B - sign(sum of s * T))`` for ``s = sign(g)``.

    NaN counts as 0.
    """
    known_NK = np.nan_to_num(gradient_NK.astype(np.float64), nan=0.0)
    s_NK = wide(np.sign(known_NK))
    score_NJ = group_score(s_NK * trits_NK, group_size)
    votes = _saturate(wide(votes_NK) - s_NK, vote_bits)
    exponent_votes = _saturate(wide(exponent_votes_NJ) - np.sign(score_NJ))
    return votes, exponent_votes


def crossings(accumulator: Array, threshold: int) -> Array:
    """Return ``[A >= theta] - [A <= -theta]``."""
    votes = wide(accumulator)
    return wide(votes >= threshold) - wide(votes <= -threshold)


def _leaked(accumulator: Array, leak: int) -> Array:
    votes = wide(accumulator)
    result: Array = np.sign(votes) * np.maximum(np.abs(votes) - leak, 0)
    return result


def apply_votes(
    trits_NK: Array,
    votes_NK: Array,
    threshold: int,
    leak: int = 0,
) -> tuple[Array, Array, int]:
    """Flip trits.

    ``f = [A >= theta] - [A <= -theta]``; ``T = clip(T + f, -1, 1)``; ``A[f != 0] = 0``; then the
    leak.

    Returns:
        trits, votes and the number of trits that changed.
    """
    f_NK = crossings(votes_NK, threshold)
    after = np.clip(wide(trits_NK) + f_NK, -1, 1).astype(np.int8)
    kept = np.where(f_NK != 0, 0, votes_NK)
    left = _leaked(kept, leak).astype(np.int8)
    return after, left, int((after != trits_NK).sum())


def apply_exponent_votes(
    exponent: Array,
    exponent_votes: Array,
    origin: Array,
    threshold: int,
    band: int,
    leak: int = 0,
) -> tuple[Array, Array, int]:
    """Move exponents: ``E = clip(E + up, E0 - band, E0 + band)``, ``B = B - theta * up``.

    ``2**E`` stays a normal float32.

    Returns:
        exponents, votes and the number of exponents that changed.
    """
    up = crossings(exponent_votes, threshold)
    centre = wide(origin)
    within_band = np.clip(wide(exponent) + up, centre - band, centre + band)
    after = np.clip(within_band, -126, 127).astype(np.int8)
    left = _leaked(wide(exponent_votes) - threshold * up, leak).astype(np.int8)
    return after, left, int((after != exponent).sum())


def _mix64(value: int) -> int:
    value ^= value >> 30
    value = (value * 0xBF58476D1CE4E5B9) & _MASK64
    value ^= value >> 27
    value = (value * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def counter_hash_bits(index: int, seed: int, step: int, stream: int) -> int:
    """Return the counter hash of one element, 32 bits.

    splitmix64 folds the key, lowbias32 finalises.
    """
    folded = 0
    for word in (seed, step, stream, index >> 32):
        folded ^= word & _MASK64
        folded = (folded + 0x9E3779B97F4A7C15) & _MASK64
        folded = _mix64(folded)
    key = (folded >> 32) ^ (folded & _MASK32)
    low = index & _MASK32
    x = (low * 0x9E3779B1 + key) & _MASK32
    x ^= x >> 16
    x = (x * 0x7FEB352D) & _MASK32
    x ^= x >> 15
    x = (x * 0x846CA68B) & _MASK32
    return x ^ (x >> 16)


def counter_hash_uniform(index: int, seed: int, step: int, stream: int) -> float:
    """Return ``u`` in [0, 1) of one element by the counter hash."""
    return (counter_hash_bits(index, seed, step, stream) >> 8) / 2.0**24


def quantize_gradient(grad_MN: Array, seed: int, step: int, stream: int) -> tuple[Array, float]:
    """Return ``q = floor(g / scale + u)`` and ``scale``.

    ``scale = 2**e`` with the smallest ``e`` such that ``max|g| <= 127 * scale``.
    """
    grad = grad_MN.astype(np.float32)
    known = np.where(np.isnan(grad), 0, grad)
    largest = float(np.abs(known).max(initial=0.0))
    if largest == 0 or not np.isfinite(largest):
        return np.zeros(grad.shape, np.int8), 1.0
    exponent = -126
    while largest > 127 * 2.0**exponent:
        exponent += 1
    scale = 2.0**exponent

    flat = [counter_hash_uniform(index, seed, step, stream) for index in range(grad.size)]
    noise = np.array(flat, np.float32).reshape(grad.shape)
    rounded = np.floor(noise + grad / np.float32(scale))
    q = np.nan_to_num(np.clip(rounded, -127, 127), nan=0.0)
    return q.astype(np.int8), scale


def dot_product_bound(terms: int, absolute_sum: Array, roundoff: float = FLOAT32_ROUNDOFF) -> Array:
    """Return a bound on the error of a dot product of ``terms`` terms in any order of summation.

    ``gamma_n * sum |x_i y_i|`` with ``gamma_n = n u / (1 - n u)`` (Higham, Accuracy and Stability
    of Numerical Algorithms, 2nd edition, section 3.1), for ``n = terms + 1`` to leave room for the
    rounding of the result.
    """
    n = terms + 1
    gamma = n * roundoff / (1 - n * roundoff)
    return absolute_sum * gamma
