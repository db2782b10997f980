"""Keys of the counter hash for kernels, computed on the host."""

from __future__ import annotations

from typing import Final, NamedTuple

from arb_ternary.counters.hashing import hash_key, signed

#: Elements that two keys serve: each block of 2**32 indices has its own.
_LARGEST: Final = 1 << 33


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
        raise ValueError(
            f"the triton backend hashes up to {_LARGEST} elements of a tensor, got {count}"
        )
    wide = count > _LARGEST >> 1
    first = signed(hash_key(seed, step, stream))
    second = signed(hash_key(seed, step, stream, 1)) if wide else 0
    return HashKeys(first, second, wide)
