"""Trits in blocks of a GGUF file: TQ1_0, TQ2_0, Q2_0 and Q4_0, each with a float16 scale a block.

A weight is a code minus an offset, times its block's scale. ``code = t + 1`` except in Q4_0, where
it is ``t + 8``. Scales are powers of two, ``2**E``, and exact in float16 for E from -24 to 15; a
row may have a factor besides.

Shapes: ``N`` rows, ``K`` columns, ``B`` blocks of a row.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from arb_ternary_interchange.gguf.tensor_types import (
    FORK_Q2_0,
    Q2_0,
    Q4_0,
    TQ1_0,
    TQ2_0,
    TensorType,
)

#: Exponents whose power of two float16 holds exactly, subnormal ones included.
EXPONENTS: Final = range(-24, 16)

#: Types that ``encode_trits`` writes.
TERNARY_TYPES: Final = (TQ2_0, TQ1_0, Q2_0, Q4_0)

_FOUR: Final = np.arange(0, 8, 2, dtype=np.uint8)
_POWERS: Final = np.array([81, 27, 9, 3, 1], dtype=np.uint8)
_CODE_OF_ZERO: Final = {TQ1_0: 1, TQ2_0: 1, Q2_0: 1, FORK_Q2_0: 1, Q4_0: 8}


def encode_trits(
    trits_NK: NDArray[np.int8],
    exponent_NB: NDArray[np.int8],
    kind: TensorType,
    factor_N: NDArray[np.float32] | None = None,
) -> NDArray[np.uint8]:
    """``factor * trits * 2**exponent`` exactly, as uint8 ``[N, bytes of a row]``.

    Args:
        trits_NK: -1, 0 or 1.
        exponent_NB: one for each block of ``kind.block`` columns, within :data:`EXPONENTS`.
        kind: one of :data:`TERNARY_TYPES`, or the fork's Q2_0.
        factor_N: of rows; float16 holds its products with the powers of two. None = 1.
    """
    rows, columns = trits_NK.shape
    blocks = columns // kind.block
    codes = (
        (trits_NK + np.int8(_CODE_OF_ZERO[kind])).view(np.uint8).reshape(rows, blocks, kind.block)
    )
    factor = np.ones(rows, np.float32) if factor_N is None else factor_N
    scale = np.ldexp(factor[:, None], exponent_NB.astype(np.int32)).astype("<f2").view(np.uint8)
    scale = scale.reshape(rows, blocks, 2)
    if kind is TQ2_0:
        parts = [_two_bits(codes.reshape(rows, blocks, 2, 4, 32), axis=3), scale]
    elif kind is TQ1_0:
        parts = [
            _base_3(codes[..., :160], 32, 5),
            _base_3(codes[..., 160:240], 16, 5),
            _base_3(codes[..., 240:], 4, 4),
            scale,
        ]
    elif kind is Q4_0:
        parts = [scale, codes[..., :16] | codes[..., 16:] << np.uint8(4)]
    else:
        parts = [scale, _two_bits(codes.reshape(rows, blocks, -1, 4), axis=3)]
    return np.concatenate([part.reshape(rows, blocks, -1) for part in parts], axis=2).reshape(
        rows, -1
    )


def decode_codes(
    data: NDArray[np.uint8], kind: TensorType
) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """What stands in uint8 ``[N, bytes of a row]``: integers, int8 ``[N, K]``, and scales ``[N,
    B]``.

    The integers are trits unless the tensor holds something else: 2 in TQ2_0 and Q2_0, -8 to 7 in
    Q4_0.
    """
    rows = len(data)
    stored = data.reshape(rows, -1, kind.size)
    blocks = stored.shape[1]
    at_end = kind in (TQ1_0, TQ2_0)
    scale = np.ascontiguousarray(stored[..., -2:] if at_end else stored[..., :2]).view("<f2")
    packed = stored[..., :-2] if at_end else stored[..., 2:]
    if kind is TQ2_0:
        codes = packed.reshape(rows, blocks, 2, 1, 32) >> _FOUR[:, None] & np.uint8(3)
    elif kind is TQ1_0:
        codes = np.concatenate(
            [
                _digits(packed[..., :32], 5),
                _digits(packed[..., 32:48], 5),
                _digits(packed[..., 48:], 4),
            ],
            axis=2,
        )
    elif kind is Q4_0:
        codes = np.concatenate([packed & np.uint8(15), packed >> np.uint8(4)], axis=2)
    else:
        codes = packed[..., None] >> _FOUR & np.uint8(3)
    values = codes.reshape(rows, -1).view(np.int8)
    values -= np.int8(_CODE_OF_ZERO[kind])
    return values, scale.astype(np.float32).reshape(rows, blocks)


def _two_bits(codes: NDArray[np.uint8], axis: int) -> NDArray[np.uint8]:
    """Four codes along ``axis`` in a byte, the first in the lowest bits."""
    first, second, third, fourth = (np.take(codes, i, axis=axis) for i in range(4))
    packed: NDArray[np.uint8] = (
        first | second << np.uint8(2) | third << np.uint8(4) | fourth << np.uint8(6)
    )
    return packed


def _base_3(codes_NBC: NDArray[np.uint8], width: int, digits: int) -> NDArray[np.uint8]:
    """``width`` bytes of ``digits`` codes each, codes ``width`` apart in a byte.

    The byte is ``ceil(256 q / 243)`` of the number ``q`` whose first digit is the most significant
    of five.
    """
    grouped = codes_NBC.reshape(*codes_NBC.shape[:2], digits, width) * _POWERS[:digits, None]
    number = grouped.sum(axis=2, dtype=np.uint16)
    packed: NDArray[np.uint8] = (
        (number * np.uint16(256) + np.uint16(242)) // np.uint16(243)
    ).astype(np.uint8)
    return packed


def _digits(packed_NBW: NDArray[np.uint8], digits: int) -> NDArray[np.uint8]:
    """The inverse of :func:`_base_3`: the top digit of ``byte * 3**i`` modulo 256."""
    turned = packed_NBW[:, :, None, :] * _POWERS[::-1][:digits, None]
    found = (turned.astype(np.uint16) * np.uint16(3) >> np.uint16(8)).astype(np.uint8)
    return found.reshape(*packed_NBW.shape[:2], -1)
