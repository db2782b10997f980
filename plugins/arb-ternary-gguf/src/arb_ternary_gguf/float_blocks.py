"""Float weights in a GGUF file: F32, F16 and BF16 both ways; Q8_0, Q4_0 and Q4_1 read."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from arb_ternary_gguf.tensor_types import BF16, F16, F32, FORK_Q2_0, Q2_0, Q4_0, Q4_1, Q8_0, TQ1_0, TQ2_0, TensorType
from arb_ternary_gguf.trit_blocks import decode_codes

__all__ = ["FLOAT_TYPES", "READABLE", "decode_floats", "encode_floats", "holds"]

#: Types that ``encode_floats`` writes.
FLOAT_TYPES: Final = (F32, F16, BF16)

#: Types that ``decode_floats`` reads.
READABLE: Final = (F32, F16, BF16, Q8_0, Q4_0, Q4_1, TQ1_0, TQ2_0, Q2_0, FORK_Q2_0)


def encode_floats(values: NDArray[np.float32], kind: TensorType) -> NDArray[np.uint8]:
    """float32 ``[N, K]`` as uint8 ``[N, bytes of a row]``; the values are ones that ``kind`` holds."""
    if kind is F32:
        stored = values.astype("<f4")
    elif kind is F16:
        stored = values.astype("<f2")
    else:
        stored = (values.astype("<f4").view("<u4") >> np.uint32(16)).astype("<u2")
    return np.ascontiguousarray(stored).view(np.uint8).reshape(len(values), -1)


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
        codes = np.concatenate([stored[..., 4:] & np.uint8(15), stored[..., 4:] >> np.uint8(4)], axis=2)
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
