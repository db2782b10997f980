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


def int8(values: Array) -> Array:
    """Return numbers as int8."""
    return values.astype(np.int8)


def float32(values: Any) -> Array:
    """Return numbers as float32, each rounded to nearest even."""
    return np.array(values, np.float32)


def groups(columns: int, group_size: int) -> int:
    """Return ``J``, the number of exponents per row."""
    return -(-columns // group_size)


def spread(values_NJ: Array, columns: int, group_size: int) -> Array:
    """Repeat the value of each group over the group's columns: ``[N, J]`` to ``[N, K]``."""
    group_K = np.arange(columns) // group_size
    return values_NJ[:, group_K]


def pack_base3(trits_NK: Array) -> Array:
    """Return the at-rest form: ``byte = sum((t_i + 1) * 3**i)`` over five trits.

    Rows are padded with ``t = 0``.
    """
    rows, columns = trits_NK.shape
    width = groups(columns, 5)
    padding = 5 * width - columns
    padded = np.pad(trits_NK, ((0, 0), (0, padding)))
    digits = padded.reshape(rows, width, 5) + 1
    powers = np.array([1, 3, 9, 27, 81])
    words: Array = (digits * powers).sum(axis=2)
    return words.astype(np.uint8)


def dense_weight(trits_NK: Array, exponent_NJ: Array, group_size: int) -> Array:
    """Return ``T * 2**E`` in float64, exact."""
    columns = trits_NK.shape[1]
    scale_NJ = np.exp2(exponent_NJ.astype(np.float64))
    scale_NK = spread(scale_NJ, columns, group_size)
    return trits_NK * scale_NK


def quantize_rows(x_MK: Array) -> tuple[Array, Array]:
    """Return ``q = round_half_even(x / s)`` and ``s = max|x| / 127`` in float32.

    Rows of zeros give zeros.
    """
    x = float32(x_MK)
    largest = np.abs(x).max(axis=1, initial=0.0)
    scale = float32(largest / np.float32(127))
    divisor = scale[:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        quotient = np.where(divisor == 0, np.float32(0), x / divisor)
    q = np.rint(quotient)
    return int8(q), scale


def _exact_product(left_MK: Array, right_KN: Array) -> Array:
    """Return an integer matrix product that cannot overflow.

    It is computed in int64 if that is large enough, and in Python integers otherwise.
    """
    rows, terms = left_MK.shape
    columns = right_KN.shape[1]
    if terms == 0:
        return np.zeros((rows, columns), np.int64)
    largest_left = int(np.abs(left_MK).max(initial=0))
    largest_right = int(np.abs(right_KN).max(initial=0))
    fits = largest_left * largest_right * terms < 2**62
    kind: Any = np.int64 if fits else object
    left = left_MK.astype(kind)
    right = right_KN.astype(kind)
    result: Array = left @ right
    return result


def _shifted(trits_NK: Array, shift_NK: Array) -> Array:
    """Return trits shifted left, in Python integers if int64 is not large enough."""
    largest = int(shift_NK.max(initial=0))
    kind: Any = np.int64 if largest < 60 else object
    trits = trits_NK.astype(kind)
    shift = shift_NK.astype(kind)
    result: Array = trits << shift
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
    shift_NJ = exponent - floor_N[:, None]
    shift_NK = spread(shift_NJ, columns, group_size)

    weight_NK = _shifted(trits_NK, shift_NK)
    acc_MN = _exact_product(q_MK, weight_NK.T)

    unit_N = float32(np.exp2(floor_N))
    scale_M1 = float32(scale_M)[:, None]
    y_MN = float32(wide(acc_MN))
    y_MN = y_MN * scale_M1
    y_MN = y_MN * unit_N
    if bias_N is not None:
        y_MN = y_MN + float32(bias_N)
    return y_MN


def linear_int8_grad_input(
    q_MN: Array,
    scale: float,
    trits_NK: Array,
    exponent_NJ: Array,
    group_size: int,
) -> Array:
    """Return ``grad_y @ W`` for an int8 gradient.

    Sums are in units of the smallest exponent of each column group.
    """
    columns = trits_NK.shape[1]
    exponent = wide(exponent_NJ)
    floor_J = exponent.min(axis=0, keepdims=True)
    shift_NJ = exponent - floor_J
    shift_NK = spread(shift_NJ, columns, group_size)

    weight_NK = _shifted(trits_NK, shift_NK)
    acc_MK = _exact_product(q_MN, weight_NK)

    unit_J = float32(np.exp2(floor_J))
    unit_K = spread(unit_J, columns, group_size)
    grad_MK = float32(wide(acc_MK)) * np.float32(scale)
    return grad_MK * unit_K


def group_score(values_NK: Array, group_size: int) -> Array:
    """Sum over the columns of each group: ``[N, K]`` to int64 ``[N, J]``."""
    rows, columns = values_NK.shape
    values = wide(values_NK)
    group_count = groups(columns, group_size)
    score_NJ = np.zeros((rows, group_count), np.int64)
    for group in range(group_count):
        start = group * group_size
        stop = start + group_size
        score_NJ[:, group] = values[:, start:stop].sum(axis=1)
    return score_NJ


def _saturate(values: Array, bits: int = 8) -> Array:
    """Return ``values`` clipped to the range of accumulators of this many bits."""
    low, high = VOTE_RANGES[bits]
    clipped = np.clip(values, low, high)
    return int8(clipped)


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
    up = wide(votes >= threshold)
    down = wide(votes <= -threshold)
    return up - down


def _leaked(accumulator: Array, leak: int) -> Array:
    """Return accumulators moved towards zero by ``leak``, as int8."""
    votes = wide(accumulator)
    sizes = np.abs(votes) - leak
    left: Array = np.sign(votes) * np.maximum(sizes, 0)
    return int8(left)


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
    after = np.clip(trits_NK + f_NK, -1, 1)
    changed = after != trits_NK
    kept = np.where(f_NK != 0, 0, votes_NK)
    left = _leaked(kept, leak)
    return int8(after), left, int(changed.sum())


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
    lowest = centre - band
    highest = centre + band
    within_band = np.clip(exponent + up, lowest, highest)
    after = np.clip(within_band, -126, 127)
    changed = after != exponent
    left = _leaked(exponent_votes - threshold * up, leak)
    return int8(after), left, int(changed.sum())


def _mix64(value: int) -> int:
    """Return the last step of splitmix64: a bijection of 64-bit words."""
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
    bits = counter_hash_bits(index, seed, step, stream)
    return (bits >> 8) / 2.0**24


def quantize_gradient(grad_MN: Array, seed: int, step: int, stream: int) -> tuple[Array, float]:
    """Return ``q = floor(g / scale + u)`` and ``scale``.

    ``scale = 2**e`` with the smallest ``e`` such that ``max|g| <= 127 * scale``.
    """
    grad = float32(grad_MN)
    known = np.where(np.isnan(grad), 0, grad)
    sizes = np.abs(known)
    largest = float(sizes.max(initial=0.0))
    if largest == 0 or not np.isfinite(largest):
        return np.zeros(grad.shape, np.int8), 1.0
    exponent = -126
    while largest > 127 * 2.0**exponent:
        exponent += 1
    scale = 2.0**exponent

    flat = [counter_hash_uniform(index, seed, step, stream) for index in range(grad.size)]
    noise = np.array(flat, np.float32).reshape(grad.shape)
    quotient = grad / np.float32(scale)
    rounded = np.floor(noise + quotient)
    clipped = np.clip(rounded, -127, 127)
    q = np.nan_to_num(clipped, nan=0.0)
    return int8(q), scale


def dot_product_bound(
    terms: int,
    absolute_sum: Array,
    roundoff: float = FLOAT32_ROUNDOFF,
) -> Array:
    """Return a bound on the error of a dot product of ``terms`` terms in any order of summation.

    The bound is ``gamma_n * sum |x_i y_i|`` with ``gamma_n = n u / (1 - n u)`` (Higham, Accuracy
    and Stability of Numerical Algorithms, 2nd edition, section 3.1). ``n = terms + 1`` leaves room
    for the rounding of the result.
    """
    n = terms + 1
    error = n * roundoff
    gamma = error / (1 - error)
    return absolute_sum * gamma
