"""The number format and its updates once more, in numpy and Python integers: the expected values of
the suites.

Written from the rules and not from any backend, with the plainest arithmetic that gives the exact
result. Shapes: ``M`` rows, ``K`` input features, ``N`` output features, ``G`` group size, ``J =
ceil(K / G)``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

#: Unit roundoff of float32: half the distance from 1 to the next number.
FLOAT32_ROUNDOFF = 2.0**-24


def groups(columns: int, group_size: int) -> int:
    """``J``: exponents a row."""
    return -(-columns // group_size)


def spread(values_NJ: Array, columns: int, group_size: int) -> Array:
    """Repeat one value a group over the group's columns: ``[N, J]`` to ``[N, K]``."""
    return values_NJ[:, np.arange(columns) // group_size]


def pack_base3(trits_NK: Array) -> Array:
    """The at-rest form: ``byte = sum((t_i + 1) * 3**i)`` over five trits, rows padded with ``t =
    0``.
    """
    rows, columns = trits_NK.shape
    width = -(-columns // 5)
    out = np.zeros((rows, width), np.uint8)
    for n in range(rows):
        for i in range(width):
            five = [int(trits_NK[n, k]) if k < columns else 0 for k in range(5 * i, 5 * i + 5)]
            out[n, i] = sum((t + 1) * 3**j for j, t in enumerate(five))
    return out


def dense_weight(trits_NK: Array, exponent_NJ: Array, group_size: int) -> Array:
    """``T * 2**E`` in float64, exact."""
    scale = np.exp2(spread(exponent_NJ.astype(np.float64), trits_NK.shape[1], group_size))
    return trits_NK.astype(np.float64) * scale


def quantize_rows(x_MK: Array) -> tuple[Array, Array]:
    """``s = max|x| / 127`` and ``q = round_half_even(x / s)`` in float32; zero rows give zeros."""
    x = x_MK.astype(np.float32)
    scale = (np.abs(x).max(axis=1, initial=0.0) / np.float32(127)).astype(np.float32)
    with np.errstate(divide="ignore", invalid="ignore"):
        quotient = np.where(scale[:, None] == 0, np.float32(0), x / scale[:, None])
    return np.rint(quotient).astype(np.int8), scale


def _exact_product(left_MK: Array, right_KN: Array) -> Array:
    """An integer matrix product that cannot overflow: int64 where it fits, Python integers where it
    may not.
    """
    if not left_MK.shape[1]:
        return np.zeros((left_MK.shape[0], right_KN.shape[1]), np.int64)
    bound = (
        int(np.abs(left_MK).max(initial=0))
        * int(np.abs(right_KN).max(initial=0))
        * left_MK.shape[1]
    )
    kind: Any = np.int64 if bound < 2**62 else object
    result: Array = left_MK.astype(kind) @ right_KN.astype(kind)
    return result


def _to_float32(integers: Array) -> Array:
    """Integers to float32, rounded once to nearest even."""
    return integers.astype(np.int64).astype(np.float32)


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
    """``float32(sum_g acc_g << (E_g - Emin)) * scale * 2**Emin (+ bias)``: one rounding for each
    operation.
    """
    wide = exponent_NJ.astype(np.int64)
    floor_N = wide.min(axis=1, initial=127) if wide.shape[1] else np.zeros(len(wide), np.int64)
    shift_NK = spread(wide - floor_N[:, None], trits_NK.shape[1], group_size)
    acc = _exact_product(q_MK, _shifted(trits_NK, shift_NK).T)
    y = _to_float32(acc) * scale_M.astype(np.float32)[:, None] * np.exp2(floor_N).astype(np.float32)
    y = y.astype(np.float32)
    result: Array = y if bias_N is None else y + bias_N.astype(np.float32)
    return result


def linear_int8_grad_input(
    q_MN: Array, scale: float, trits_NK: Array, exponent_NJ: Array, group_size: int
) -> Array:
    """``grad_y @ W`` of an int8 gradient, summed in units of the smallest exponent of each column
    group.
    """
    columns = trits_NK.shape[1]
    wide = exponent_NJ.astype(np.int64)
    floor_J = wide.min(axis=0, keepdims=True)
    acc = _exact_product(q_MN, _shifted(trits_NK, spread(wide - floor_J, columns, group_size)))
    floor_K = spread(np.exp2(floor_J).astype(np.float32), columns, group_size)
    return (_to_float32(acc) * np.float32(scale) * floor_K).astype(np.float32)


def group_score(values_NK: Array, group_size: int) -> Array:
    """Sum over the columns of each group: ``[N, K]`` to int64 ``[N, J]``."""
    rows, columns = values_NK.shape
    out = np.zeros((rows, groups(columns, group_size)), np.int64)
    for j in range(out.shape[1]):
        out[:, j] = values_NK[:, j * group_size : (j + 1) * group_size].astype(np.int64).sum(axis=1)
    return out


#: Where accumulators of 8, 4 and 2 bits saturate under sign votes.
VOTE_RANGES = {8: (-128, 127), 4: (-7, 7), 2: (-1, 1)}


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
    """``A = sat(A - s)`` and ``B = sat8(B - sign(sum of s * T))`` for ``s = sign(g)``, NaN counting
    as 0.
    """
    s_NK = np.sign(np.nan_to_num(gradient_NK.astype(np.float64), nan=0.0)).astype(np.int64)
    score_NJ = group_score(s_NK * trits_NK, group_size)
    return (
        _saturate(votes_NK.astype(np.int64) - s_NK, vote_bits),
        _saturate(exponent_votes_NJ.astype(np.int64) - np.sign(score_NJ)),
    )


def _crossings(accumulator: Array, threshold: int) -> Array:
    wide = accumulator.astype(np.int64)
    return (wide >= threshold).astype(np.int64) - (wide <= -threshold).astype(np.int64)


def _leaked(accumulator: Array, leak: int) -> Array:
    wide = accumulator.astype(np.int64)
    result: Array = np.sign(wide) * np.maximum(np.abs(wide) - leak, 0)
    return result


def apply_votes(
    trits_NK: Array, votes_NK: Array, threshold: int, leak: int = 0
) -> tuple[Array, Array, int]:
    """``f = [A >= theta] - [A <= -theta]``; ``T = clip(T + f, -1, 1)``; ``A[f != 0] = 0``; then the
    leak.

    Returns:
        trits, votes and the number of trits that changed.
    """
    f = _crossings(votes_NK, threshold)
    after = np.clip(trits_NK.astype(np.int64) + f, -1, 1).astype(np.int8)
    left = _leaked(np.where(f != 0, 0, votes_NK), leak).astype(np.int8)
    return after, left, int((after != trits_NK).sum())


def apply_exponent_votes(
    exponent: Array, exponent_votes: Array, origin: Array, threshold: int, band: int, leak: int = 0
) -> tuple[Array, Array, int]:
    """``E = clip(E + up, E0 - band, E0 + band)``, ``B = B - theta * up``; ``2**E`` stays a normal
    float32.

    Returns:
        exponents, votes and the number of exponents that changed.
    """
    up = _crossings(exponent_votes, threshold)
    centre = origin.astype(np.int64)
    after = np.clip(
        np.clip(exponent.astype(np.int64) + up, centre - band, centre + band), -126, 127
    ).astype(np.int8)
    left = _leaked(exponent_votes.astype(np.int64) - threshold * up, leak).astype(np.int8)
    return after, left, int((after != exponent).sum())


_MASK64 = (1 << 64) - 1
_MASK32 = (1 << 32) - 1


def _mix64(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def counter_hash_bits(index: int, seed: int, step: int, stream: int) -> int:
    """The counter hash of one element, 32 bits: splitmix64 folds the key, lowbias32 finalises."""
    folded = 0
    for word in (seed, step, stream, index >> 32):
        folded = _mix64(((folded ^ (word & _MASK64)) + 0x9E3779B97F4A7C15) & _MASK64)
    key = (folded >> 32) ^ (folded & _MASK32)
    x = ((index & _MASK32) * 0x9E3779B1 + key) & _MASK32
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK32
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK32
    return x ^ (x >> 16)


def counter_hash_uniform(index: int, seed: int, step: int, stream: int) -> float:
    """``u`` in [0, 1) of one element by the counter hash."""
    return (counter_hash_bits(index, seed, step, stream) >> 8) / 2.0**24


def quantize_gradient(grad_MN: Array, seed: int, step: int, stream: int) -> tuple[Array, float]:
    """``scale = 2**e`` with the smallest ``e`` such that ``max|g| <= 127 * scale``; ``q = floor(g /
    scale + u)``.
    """
    grad = grad_MN.astype(np.float32)
    largest = float(np.abs(np.where(np.isnan(grad), 0, grad)).max(initial=0.0))
    if largest == 0 or not np.isfinite(largest):
        return np.zeros(grad.shape, np.int8), 1.0
    exponent = -126
    while largest > 127 * 2.0**exponent:
        exponent += 1
    noise = np.array(
        [counter_hash_uniform(index, seed, step, stream) for index in range(grad.size)], np.float32
    ).reshape(grad.shape)
    rounded = np.floor(noise + grad / np.float32(2.0**exponent))
    return np.nan_to_num(np.clip(rounded, -127, 127), nan=0.0).astype(np.int8), 2.0**exponent


def dot_product_bound(terms: int, absolute_sum: Array, roundoff: float = FLOAT32_ROUNDOFF) -> Array:
    """Bound on the error of a dot product of ``terms`` terms in any order of summation.

    ``gamma_n * sum |x_i y_i|`` with ``gamma_n = n u / (1 - n u)`` (Higham, Accuracy and Stability
    of Numerical Algorithms, 2nd edition, section 3.1), for ``n = terms + 1`` to leave room for the
    rounding of the result.
    """
    n = terms + 1
    return absolute_sum * (n * roundoff / (1 - n * roundoff))
