"""The counter hash: randomness without state, the same in every backend.

Stochastic rounding draws ``u`` in [0, 1) from a hash of (seed, step, stream, index). ``stream``
identifies the tensor and the use within a step, and ``index`` is the flat logical index of the
element. Nothing is stored. Therefore the numbers are the same on one rank or eight, on CPU or GPU,
and after a resume.

Definition (all arithmetic modulo 2**32 unless stated):

1. ``key``: fold the 64-bit words seed, step, stream and ``index >> 32`` with splitmix64 (Steele,
   Lea and Flood, 2014): ``h = 0``; for each word ``w``: ``h = mix64((h ^ w) + 0x9E3779B97F4A7C15
   mod 2**64)``. ``key = (h >> 32) ^ (h & 0xFFFFFFFF)``.
2. ``x = (index & 0xFFFFFFFF) * 0x9E3779B1 + key``, then the finaliser "lowbias32" (Wellons, 2018):
   ``x ^= x >> 16; x *= 0x7FEB352D; x ^= x >> 15; x *= 0x846CA68B; x ^= x >> 16``.

``u = (x >> 8) / 2**24``, which float32 holds exactly.

In an op, ``step`` is ``(optimizer steps << MICRO_BITS) + micro-batch`` and ``stream`` is ``stream *
HASH_USES + use``: every use within a step has a stream of its own.

A module keeps its words in ``control``, an int64 buffer ``[4]``: seed of the run, optimizer steps
taken, stream (identity of the tensor), and a number that distinguishes the casts of a step. That
number counts the casts. It begins at ``CASTS`` times the index of the micro-batch in its step, if
the caller states that index. The words are a tensor, not Python numbers, so that a compiled graph
does not depend on the step. The tensor stays on the host, so that reading it waits for no device.
"""

from __future__ import annotations

import math
import zlib
from functools import cache
from typing import Final, NamedTuple

import torch
from torch import Tensor

#: Positions of the control words.
SEED: Final = 0
STEP: Final = 1
STREAM: Final = 2
MICRO: Final = 3

#: Uses of the counter hash within one step of one tensor.
HASH_USES: Final = 8
#: int8 rounding of a gradient: for ``grad_x``, for the votes of a linear, and for those of an
#: embedding.
USE_GRAD_INPUT: Final = 0
USE_VOTES: Final = 1
USE_EMBEDDING: Final = 2
#: Rounding of scaled votes, of votes for exponents, and of the decay of accumulators.
USE_VOTE_ROUNDING: Final = 3
USE_EXPONENT_ROUNDING: Final = 4
USE_DECAY: Final = 5
#: Number of casts with hashes of their own: in a step, ``2**MICRO_BITS``, and in one micro-batch of
#: several.
MICRO_BITS: Final = 20
CASTS: Final = 256

_MASK64: Final = (1 << 64) - 1
_MASK32: Final = (1 << 32) - 1
#: Elements that two keys serve: each block of 2**32 indices has its own.
_LARGEST: Final = 1 << 33
#: Elements hashed at a time, so that the intermediate stays in the second-level cache.
_CHUNK: Final = 1 << 17


def new_control() -> Tensor:
    """Return the control words of a module that has taken no step: all zero."""
    return torch.zeros(4, dtype=torch.int64)


def hash_words(control: Tensor) -> tuple[int, int, int]:
    """Return ``seed, step, stream`` for the hash of a kernel.

    ``step`` counts micro-batches too. A use is added to ``stream``.
    """
    seed, step, stream, micro = control.tolist()[:4]
    return seed, (step << MICRO_BITS) + micro, stream * HASH_USES


def _mix64(value: int) -> int:
    """The finaliser of splitmix64."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def stream_id(name: str) -> int:
    """Return a stable identity for the tensor of this qualified name: CRC-32 of its UTF-8 bytes."""
    return zlib.crc32(name.encode())


def hash_key(seed: int, step: int, stream: int, high_index: int = 0) -> int:
    """Return the 32-bit key of one (seed, step, stream) and block of 2**32 indices."""
    folded = 0
    for word in (seed, step, stream, high_index):
        folded = _mix64(((folded ^ (word & _MASK64)) + 0x9E3779B97F4A7C15) & _MASK64)
    return (folded >> 32) ^ (folded & _MASK32)


def signed(value: int) -> int:
    """Return the int32 with the bits of an unsigned 32-bit ``value``, for tensors and kernels."""
    value &= _MASK32
    return value - (1 << 32) if value >= 1 << 31 else value


class HashKeys(NamedTuple):
    """Keys of one stream of the counter hash.

    Attributes:
        first: key of the first 2**32 indices, as int32.
        second: key of the next 2**32 indices.
        wide: whether the second key is needed.
    """

    first: int = 0
    second: int = 0
    wide: bool = False


def hash_keys(seed: int, step: int, stream: int, count: int) -> HashKeys:
    """Return the keys for ``count`` elements.

    Raises:
        ValueError: ``count`` exceeds 2**33.
    """
    if count > _LARGEST:
        raise ValueError(f"kernels hash up to {_LARGEST} elements of a tensor, got {count}")
    wide = count > _LARGEST >> 1
    first = signed(hash_key(seed, step, stream))
    second = signed(hash_key(seed, step, stream, 1)) if wide else 0
    return HashKeys(first, second, wide)


def _finalise_(x: Tensor, scratch: Tensor) -> None:
    """The lowbias32 finaliser on int32 bits, in place; ``scratch`` has the shape of ``x``."""
    for shift, multiplier in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        torch.bitwise_right_shift(x, shift, out=scratch)
        scratch.bitwise_and_((1 << (32 - shift)) - 1)
        x.bitwise_xor_(scratch)
        x.mul_(signed(multiplier))
    torch.bitwise_right_shift(x, 16, out=scratch)
    scratch.bitwise_and_(0xFFFF)
    x.bitwise_xor_(scratch)


@cache
def _ramp(size: int, device: torch.device) -> Tensor:
    """``index * 0x9E3779B1`` of a chunk; computed once per device."""
    with torch.inference_mode(False):
        return torch.arange(size, dtype=torch.int32, device=device).mul_(signed(0x9E3779B1))


def counter_hash(
    count: int,
    seed: int,
    step: int,
    stream: int,
    *,
    start: int = 0,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Hash the indices ``start .. start + count - 1``.

    Returns:
        int32 ``[count]`` with the bits of the unsigned results.
    """
    out = torch.empty(count, dtype=torch.int32, device=device)
    scratch = torch.empty(min(count, _CHUNK), dtype=torch.int32, device=device)
    ramp = _ramp(_CHUNK, out.device)
    position = 0
    while position < count:
        index = start + position
        # A chunk does not cross a multiple of 2**32: the high half of the index is part of the key.
        size = min(_CHUNK, count - position, (1 << 32) - (index & _MASK32))
        key = hash_key(seed, step, stream, index >> 32)
        x = out[position : position + size]
        torch.add(ramp[:size], signed((index & _MASK32) * 0x9E3779B1 + key), out=x)
        _finalise_(x, scratch[:size])
        position += size
    return out


def counter_hash_rows(
    rows_U: Tensor, columns: int, seed: int, step: int, stream: int, *, rows: int | None = None
) -> Tensor:
    """Hash the elements of some rows (int64) of a matrix.

    The index of an element is ``row * columns + column``. ``rows``, the height of the matrix, is
    optional. It shows for most matrices that no index needs a second key, without reading
    ``rows_U``.

    Returns:
        int32 ``[U, columns]``.
    """
    first_U = rows_U * columns
    index_UK = first_U.unsqueeze(1) + torch.arange(columns, device=rows_U.device)
    if index_UK.numel() == 0:
        return index_UK.to(torch.int32)
    # int64 products wrap; their low half is the product modulo 2**32.
    x = (index_UK * 0x9E3779B1).to(torch.int32)
    if rows is not None and rows * columns <= 1 << 32:
        lowest = highest = 0
    else:
        lowest = int(first_U.min()) >> 32
        highest = (int(first_U.max()) + columns - 1) >> 32
    if lowest == highest:
        x.add_(signed(hash_key(seed, step, stream, lowest)))
    else:
        high_UK = index_UK >> 32
        for high in torch.unique(high_UK).tolist():
            key = signed(hash_key(seed, step, stream, high))
            x += torch.where(high_UK == high, key, 0).to(torch.int32)
    _finalise_(x, torch.empty_like(x))
    return x


def uniform_(bits: Tensor) -> Tensor:
    """Turn int32 hash bits into float32 numbers in [0, 1), multiples of 2**-24.

    The bits are overwritten.
    """
    bits.bitwise_right_shift_(8).bitwise_and_(0xFFFFFF)
    return bits.to(torch.float32).mul_(2.0**-24)


def uniform(
    shape: tuple[int, ...], seed: int, step: int, stream: int, *, device: torch.device | str = "cpu"
) -> Tensor:
    """Return float32 numbers in [0, 1) for the elements of ``shape``, multiples of 2**-24.

    Elements are numbered in row-major order.
    """
    return uniform_(counter_hash(math.prod(shape), seed, step, stream, device=device)).view(shape)
