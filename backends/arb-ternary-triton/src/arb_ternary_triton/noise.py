"""Words of the counter hash for kernels: the key of a stream, folded on the host."""

from __future__ import annotations

from typing import Final

from arb_ternary.counters.hashing import hash_key, signed

#: Elements that two keys serve: each block of 2**32 indices has its own.
_LARGEST: Final = 1 << 33


def hash_keys(seed: int, step: int, stream: int, count: int) -> tuple[int, int, bool]:
    """Keys of the first and the second 2**32 indices, as int32, and whether the second is needed
    for ``count``.

    Raises:
        ValueError: ``count`` exceeds 2**33.
    """
    if count > _LARGEST:
        raise ValueError(
            f"the triton backend hashes up to {_LARGEST} elements of a tensor, got {count}"
        )
    wide = count > _LARGEST >> 1
    return (
        signed(hash_key(seed, step, stream)),
        signed(hash_key(seed, step, stream, 1)) if wide else 0,
        wide,
    )
