"""Float weights in a GGUF file: F32, F16, BF16 and Q8_0 both ways; Q4_0 and Q4_1 read."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from arb_ternary_interchange.gguf.tensor_types import (
    BF16,
    F16,
    F32,
    FORK_Q2_0,
    Q2_0,
    Q4_0,
    Q4_1,
    Q8_0,
    TQ1_0,
    TQ2_0,
    TensorType,
)
from arb_ternary_interchange.gguf.trit_blocks import decode_codes

#: Types that hold each number by itself.
FLOAT_TYPES: Final = (F32, F16, BF16)

#: Types that ``decode_floats`` reads.
READABLE: Final = (F32, F16, BF16, Q8_0, Q4_0, Q4_1, TQ1_0, TQ2_0, Q2_0, FORK_Q2_0)


def encode_floats(values: NDArray[np.float32], kind: TensorType) -> NDArray[np.uint8]:
    """float32 ``[N, K]`` as uint8 ``[N, bytes of a row]``, rounded to the nearest that ``kind``
    holds.

    ``kind`` is one of :data:`FLOAT_TYPES`, or Q8_0, of which ``K`` is a multiple of its block. No
    magnitude exceeds :func:`largest`.
    """
    if kind is Q8_0:
        return _whole_multiples(values)
    if kind is F32:
        stored = values.astype("<f4")
    elif kind is F16:
        stored = values.astype("<f2")
    else:
        bits = values.astype("<f4").view("<u4")
        # Halves to even: what is left out counts as above a half where the last bit that stays is
        # odd.
        rounded = (
            bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
        ) >> np.uint32(16)
        stored = np.where(np.isnan(values), bits >> np.uint32(16), rounded).astype("<u2")
    return np.ascontiguousarray(stored).view(np.uint8).reshape(len(values), -1)


def _whole_multiples(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Blocks of 32: a 127th of the largest magnitude as float16, and the nearest whole multiples of
    it before that.
    """
    blocks = values.reshape(len(values), -1, Q8_0.block)
    scale = np.abs(blocks).max(axis=2, keepdims=True) / np.float32(127)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.where(scale > 0, np.float32(1) / scale, np.float32(0))
    with np.errstate(invalid="ignore"):
        multiples = np.nan_to_num(blocks * inverse, nan=0.0)
    # Halves away from 0, as llama.cpp does.
    codes = (
        np.trunc(multiples + np.copysign(np.float32(0.5), multiples))
        .clip(-127, 127)
        .astype(np.int8)
    )
    stored = np.concatenate([scale.astype("<f2").view(np.uint8), codes.view(np.uint8)], axis=2)
    return stored.reshape(len(values), -1)


def largest(kind: TensorType) -> float:
    """The largest magnitude that ``kind`` of :data:`FLOAT_TYPES`, or Q8_0, has a neighbour of."""
    float16 = float(np.finfo(np.float16).max)
    # bfloat16 has the exponents of float32 and seven bits behind the point.
    return {F16: float16, Q8_0: float16 * 127, BF16: (2 - 2.0**-7) * 2.0**127}.get(
        kind, float(np.finfo(np.float32).max)
    )


def decode_floats(data: NDArray[np.uint8], kind: TensorType) -> NDArray[np.float32]:
    """uint8 ``[N, bytes of a row]`` of any type in :data:`READABLE` as float32 ``[N, K]``.

    A scale that is infinite or no number makes the values of its block so.
    """
    with np.errstate(invalid="ignore"):
        return _decoded(data, kind)


def _decoded(data: NDArray[np.uint8], kind: TensorType) -> NDArray[np.float32]:
    rows = len(data)
    if kind in FLOAT_TYPES:
        data = np.ascontiguousarray(data)
        if kind is F32:
            return data.view("<f4").astype(np.float32)
        if kind is F16:
            return data.view("<f2").astype(np.float32)
        return (data.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
    if kind is Q8_0 or kind is Q4_1:
        stored = data.reshape(rows, -1, kind.size)
        scale = np.ascontiguousarray(stored[..., :2]).view("<f2").astype(np.float32)
        if kind is Q8_0:
            return (stored[..., 2:].view(np.int8) * scale).reshape(rows, -1)
        least = np.ascontiguousarray(stored[..., 2:4]).view("<f2").astype(np.float32)
        codes = np.concatenate(
            [stored[..., 4:] & np.uint8(15), stored[..., 4:] >> np.uint8(4)], axis=2
        )
        return (codes * scale + least).reshape(rows, -1)
    codes, scale = decode_codes(data, kind)
    return (codes.reshape(rows, -1, kind.block) * scale[..., None]).reshape(rows, -1)


def holds(kind: TensorType, values: NDArray[np.float32]) -> bool:
    """Whether ``kind``, a float type, holds every value exactly."""
    if kind is F32:
        return True
    if kind is F16:
        with np.errstate(over="ignore"):
            return bool(np.array_equal(values.astype(np.float16).astype(np.float32), values))
    return not bool(np.any(values.view(np.uint32) & np.uint32(0xFFFF)))
