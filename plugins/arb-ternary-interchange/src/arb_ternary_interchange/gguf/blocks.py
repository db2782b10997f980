"""The bytes of weights in a GGUF file: floats, and blocks of small integers with a float16 scale.

A weight in a block is a code minus an offset, times the block's scale. Trits are held exactly by
TQ1_0, TQ2_0, Q2_0 and Q4_0: ``code = t + 1``, except in Q4_0, where it is ``t + 8``. Scales of
trits are powers of two, ``2**E``, and exact in float16 for E from -24 to 15; a row may have a
factor in addition.

Shapes: ``N`` rows, ``K`` columns, ``B`` blocks of a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from arb_ternary_interchange.gguf.tensor_types import (
    BF16,
    F16,
    F32,
    FLOAT_TYPES,
    FORK_Q2_0,
    Q2_0,
    Q4_0,
    Q4_1,
    Q4_K,
    Q6_K,
    Q8_0,
    TQ1_0,
    TQ2_0,
    TensorType,
)

#: Exponents whose power of two float16 holds exactly, subnormal ones included.
EXPONENTS: Final = range(-24, 16)

#: Weights that are encoded or decoded at a time.
_CHUNK: Final = 1 << 22
_FLOAT16_MAX: Final = float(np.finfo(np.float16).max)
_TWO_BIT_SHIFTS: Final = np.arange(0, 8, 2, dtype=np.uint8)
_POWERS_OF_3: Final = np.array([81, 27, 9, 3, 1], dtype=np.uint8)
_CODE_OF_ZERO: Final = {TQ1_0: 1, TQ2_0: 1, Q2_0: 1, FORK_Q2_0: 1, Q4_0: 8}


def row_chunks(rows: int, columns: int) -> Iterator[slice]:
    """Yield the rows of a matrix in pieces that are small enough to be copied."""
    step = max(1, _CHUNK // columns)
    return (slice(first, min(first + step, rows)) for first in range(0, rows, step))


def chunks(values: NDArray[np.float32]) -> Iterator[NDArray[np.float32]]:
    """Yield ``values[N, K]`` in such pieces."""
    return (values[some] for some in row_chunks(*values.shape))


# --- floats


def encode_floats(values: NDArray[np.float32], kind: TensorType) -> NDArray[np.uint8]:
    """Return float32 ``[N, K]`` as uint8 ``[N, bytes of a row]``, rounded to the nearest numbers
    that ``kind`` holds.

    ``kind`` is one of :data:`.FLOAT_TYPES`, or Q8_0 if ``K`` is a multiple of its block. No
    magnitude may exceed :func:`largest`.
    """
    stored: NDArray[np.generic]
    if kind is Q8_0:
        stored = _encode_q8_0(values)
    elif kind is F32:
        stored = values.astype("<f4")
    elif kind is F16:
        stored = values.astype("<f2")
    else:
        stored = _bfloat16_bits(values)
    return np.ascontiguousarray(stored).view(np.uint8).reshape(len(values), -1)


def _bfloat16_bits(values: NDArray[np.float32]) -> NDArray[np.generic]:
    """Round to bfloat16, halves to even: what is cut off counts as more than a half if the last
    bit that stays is odd.
    """
    bits = values.astype("<f4").view("<u4")
    last = (bits >> 16) & 1
    rounded = (bits + (0x7FFF + last)) >> 16
    return np.where(np.isnan(values), bits >> 16, rounded).astype("<u2")


def _encode_q8_0(values: NDArray[np.float32]) -> NDArray[np.generic]:
    """Return blocks of 32: a 127th of the largest magnitude as float16, and the nearest multiples
    of that scale before its rounding.
    """
    blocks = values.reshape(len(values), -1, Q8_0.block)
    scale = np.abs(blocks).max(axis=2, keepdims=True) / 127
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.where(scale > 0, 1 / scale, 0)
    with np.errstate(invalid="ignore"):
        multiples = np.nan_to_num(blocks * inverse, nan=0.0)
    # Halves away from 0, as llama.cpp does.
    rounded = np.trunc(multiples + np.copysign(0.5, multiples))
    codes = rounded.clip(-127, 127).astype(np.int8)
    return np.concatenate([scale.astype("<f2").view(np.uint8), codes.view(np.uint8)], axis=2)


def largest(kind: TensorType) -> float:
    """Return the largest magnitude that ``kind``, one of :data:`.FLOAT_TYPES` or Q8_0, can hold."""
    if kind is F16:
        return _FLOAT16_MAX
    if kind is Q8_0:
        return _FLOAT16_MAX * 127
    if kind is BF16:
        # It has the exponents of float32 and seven bits behind the point.
        return float((2 - 2.0**-7) * 2.0**127)
    return float(np.finfo(np.float32).max)


def holds(kind: TensorType, values: NDArray[np.float32]) -> bool:
    """Whether ``kind``, one of :data:`.FLOAT_TYPES`, holds every value exactly."""
    if kind is F32:
        return True
    if kind is F16:
        with np.errstate(over="ignore"):
            return bool(np.array_equal(values.astype(np.float16).astype(np.float32), values))
    return not bool(np.any(values.view(np.uint32) & 0xFFFF))


def decode_floats(data: NDArray[np.uint8], kind: TensorType) -> NDArray[np.float32]:
    """Return uint8 ``[N, bytes of a row]`` of any type in :data:`.READABLE_TYPES` as float32 ``[N,
    K]``.

    If a scale is infinite or NaN, so are the values of its block.
    """
    with np.errstate(invalid="ignore"):
        if kind in FLOAT_TYPES:
            return _decode_plain(np.ascontiguousarray(data), kind)
        if kind is Q8_0 or kind is Q4_1:
            return _decode_scaled(data, kind)
        if kind is Q4_K:
            return _decode_q4_k(data)
        if kind is Q6_K:
            return _decode_q6_k(data)
        codes, scale = decode_codes(data, kind)
        values = codes.reshape(len(data), -1, kind.block) * scale[..., None]
        return values.reshape(len(data), -1)


def _decode_plain(data: NDArray[np.uint8], kind: TensorType) -> NDArray[np.float32]:
    if kind is F32:
        return data.view("<f4").astype(np.float32)
    if kind is F16:
        return data.view("<f2").astype(np.float32)
    return (data.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _decode_scaled(data: NDArray[np.uint8], kind: TensorType) -> NDArray[np.float32]:
    """Decode Q8_0 (int8 times a scale) or Q4_1 (4 bits times a scale, plus a minimum)."""
    rows = len(data)
    stored = data.reshape(rows, -1, kind.size)
    scale = _float16(stored[..., :2])
    if kind is Q8_0:
        return (stored[..., 2:].view(np.int8) * scale).reshape(rows, -1)
    least = _float16(stored[..., 2:4])
    return (_nibbles(stored[..., 4:]) * scale + least).reshape(rows, -1)


def _decode_q4_k(data: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Decode Q4_K: 8 groups of 32 weights of 4 bits, each with a scale and a minimum of 6 bits,
    which are multiples of two float16 numbers of the block.
    """
    rows = len(data)
    stored = data.reshape(rows, -1, Q4_K.size)
    blocks = stored.shape[1]
    # The first four groups have their six bits in a byte. Of the others the low four bits are in
    # the last bytes, and the high two bits above those of the first four.
    scale_bits, least_bits, low_bits = np.split(stored[..., 4:16], 3, axis=2)
    last_scales = (low_bits & 15) | (scale_bits >> 6 << 4)
    last_leasts = (low_bits >> 4) | (least_bits >> 6 << 4)
    scale_codes = np.concatenate([scale_bits & 63, last_scales], axis=2)
    least_codes = np.concatenate([least_bits & 63, last_leasts], axis=2)
    scale = _float16(stored[..., :2]) * scale_codes.astype(np.float32)
    least = _float16(stored[..., 2:4]) * least_codes.astype(np.float32)
    # 32 bytes hold two groups: the first in their low bits, the second in their high bits.
    packed = stored[..., 16:].reshape(rows, blocks, 4, 1, 32)
    codes = np.concatenate([packed & 15, packed >> 4], axis=3).reshape(rows, blocks, 8, 32)
    values: NDArray[np.float32] = codes * scale[..., None] - least[..., None]
    return values.reshape(rows, -1)


def _decode_q6_k(data: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Decode Q6_K: 16 groups of 16 weights of 6 bits, minus 32, each group with a scale of 8 bits,
    which is a multiple of the float16 number of the block.
    """
    rows = len(data)
    stored = data.reshape(rows, -1, Q6_K.size)
    blocks = stored.shape[1]
    # Each half of a block has 64 bytes of low bits and 32 bytes of high bits for 128 weights.
    low = stored[..., :128].reshape(rows, blocks, 2, 1, 64)
    low_bits = np.concatenate([low & 15, low >> 4], axis=3)
    low_bits = low_bits.reshape(rows, blocks, 2, 4, 32)
    high = stored[..., 128:192].reshape(rows, blocks, 2, 1, 32)
    high_bits = (high >> _TWO_BIT_SHIFTS[:, None]) & 3
    codes = (low_bits | (high_bits << 4)).view(np.int8) - np.int8(32)
    scale_codes = stored[..., 192:208].view(np.int8)
    scale = _float16(stored[..., 208:]) * scale_codes.astype(np.float32)
    values: NDArray[np.float32] = codes.reshape(rows, blocks, 16, 16) * scale[..., None]
    return values.reshape(rows, -1)


def _float16(stored: NDArray[np.uint8]) -> NDArray[np.float32]:
    return np.ascontiguousarray(stored).view("<f2").astype(np.float32)


# --- trits


def encode_trits(
    trits_NK: NDArray[np.int8],
    exponent_NB: NDArray[np.int8],
    kind: TensorType,
    factor_N: NDArray[np.float32] | None = None,
) -> NDArray[np.uint8]:
    """Return ``factor * trits * 2**exponent`` exactly, as uint8 ``[N, bytes of a row]``.

    Args:
        trits_NK: -1, 0 or 1.
        exponent_NB: one for each block of ``kind.block`` columns, within :data:`EXPONENTS`.
        kind: one of :data:`.TERNARY_TYPES`, or the fork's Q2_0.
        factor_N: factors of rows, whose products with the powers of two float16 holds; None = 1.
    """
    rows, columns = trits_NK.shape
    blocks = columns // kind.block
    shifted = (trits_NK + np.int8(_CODE_OF_ZERO[kind])).view(np.uint8)
    codes = shifted.reshape(rows, blocks, kind.block)
    factor = np.ones(rows, np.float32) if factor_N is None else factor_N
    product = np.ldexp(factor[:, None], exponent_NB.astype(np.int32)).astype("<f2")
    scale = product.view(np.uint8).reshape(rows, blocks, 2)
    parts: list[NDArray[Any]]
    if kind is TQ2_0:
        parts = [_pack_two_bits(codes.reshape(rows, blocks, 2, 4, 32)), scale]
    elif kind is TQ1_0:
        parts = [
            _pack_base_3(codes[..., :160], 32, 5),
            _pack_base_3(codes[..., 160:240], 16, 5),
            _pack_base_3(codes[..., 240:], 4, 4),
            scale,
        ]
    elif kind is Q4_0:
        parts = [scale, codes[..., :16] | codes[..., 16:] << 4]
    else:
        parts = [scale, _pack_two_bits(codes.reshape(rows, blocks, -1, 4))]
    flat = [part.reshape(rows, blocks, -1) for part in parts]
    return np.concatenate(flat, axis=2).reshape(rows, -1)


def decode_codes(
    data: NDArray[np.uint8], kind: TensorType
) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Decode uint8 ``[N, bytes of a row]`` into integers, int8 ``[N, K]``, and scales ``[N, B]``.

    The integers are trits unless the tensor holds something else: 2 in TQ2_0 and Q2_0, -8 to 7 in
    Q4_0.
    """
    rows = len(data)
    stored = data.reshape(rows, -1, kind.size)
    blocks = stored.shape[1]
    if kind in (TQ1_0, TQ2_0):
        packed = stored[..., :-2]
        scale = _float16(stored[..., -2:])
    else:
        packed = stored[..., 2:]
        scale = _float16(stored[..., :2])
    codes: NDArray[Any]
    if kind is TQ2_0:
        codes = packed.reshape(rows, blocks, 2, 1, 32) >> _TWO_BIT_SHIFTS[:, None] & 3
    elif kind is TQ1_0:
        digits = [
            _unpack_base_3(packed[..., :32], 5),
            _unpack_base_3(packed[..., 32:48], 5),
            _unpack_base_3(packed[..., 48:], 4),
        ]
        codes = np.concatenate(digits, axis=2)
    elif kind is Q4_0:
        codes = _nibbles(packed)
    else:
        codes = packed[..., None] >> _TWO_BIT_SHIFTS & 3
    values = codes.reshape(rows, -1).view(np.int8)
    values -= np.int8(_CODE_OF_ZERO[kind])
    return values, scale.reshape(rows, blocks)


def _nibbles(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the low four bits of all bytes of a block, then the high ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=2)


def _pack_two_bits(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Pack the four codes along axis 3 into a byte, the first into the lowest bits."""
    first, second, third, fourth = (np.take(codes, i, axis=3) for i in range(4))
    packed: NDArray[np.uint8] = first | second << 2 | third << 4 | fourth << 6
    return packed


def _pack_base_3(codes_NBC: NDArray[np.uint8], width: int, digits: int) -> NDArray[np.uint8]:
    """Pack codes into ``width`` bytes of ``digits`` codes each; those of a byte are ``width``
    apart.

    The byte is ``ceil(256 q / 243)`` of the number ``q`` whose first digit is the most significant
    of five.
    """
    grouped = codes_NBC.reshape(*codes_NBC.shape[:2], digits, width)
    number = (grouped * _POWERS_OF_3[:digits, None]).sum(axis=2, dtype=np.uint16)
    packed: NDArray[np.uint16] = (number * 256 + 242) // 243
    return packed.astype(np.uint8)


def _unpack_base_3(packed_NBW: NDArray[np.uint8], digits: int) -> NDArray[np.uint8]:
    """Return the inverse of :func:`_pack_base_3`: the top digit of ``byte * 3**i`` modulo 256."""
    turned = packed_NBW[:, :, None, :] * _POWERS_OF_3[::-1][:digits, None]
    found = (turned.astype(np.uint16) * 3 >> 8).astype(np.uint8)
    return found.reshape(*packed_NBW.shape[:2], -1)
