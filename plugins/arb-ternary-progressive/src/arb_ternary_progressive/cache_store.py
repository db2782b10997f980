"""Where cached samples lie: in memory. The form on disk is in ``cache_disk``.

A store maps a key to the bytes of a sample, keeps to a byte budget and drops what was used least recently.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

import torch
from attrs import frozen
from torch import Tensor

from arb_ternary.errors import UsageProblem

__all__ = ["CacheKey", "MemoryStore", "Store"]


@frozen
class CacheKey:
    """What a sample's hidden states depend on besides its inputs: which sample, and which trunk."""

    sample_id: int
    version: str


class Store(Protocol):
    """Bytes by key, within a budget."""

    @property
    def nbytes(self) -> int:
        """Bytes held now."""
        ...

    @property
    def evictions(self) -> int:
        """Samples dropped for want of room."""
        ...

    def __len__(self) -> int: ...

    def open(self, shape: tuple[int, int], payload_bytes: int) -> None:
        """The samples to come have this shape (positions, width) and so many bytes."""
        ...

    def get(self, key: CacheKey, inputs: bytes) -> Tensor | None:
        """uint8 ``[N]`` stored under ``key`` for these inputs (their digest), or None; it is then the newest in use."""
        ...

    def put(self, key: CacheKey, inputs: bytes, payload_N: Tensor) -> None:
        """Store uint8 ``[N]`` in place of what the key had."""
        ...

    def drop(self, key: CacheKey) -> None:
        """Forget ``key``; nothing happens where there is none."""
        ...

    def versions(self) -> set[str]:
        """The trunks that there are samples of."""
        ...

    def keep_only(self, versions: set[str]) -> None:
        """Forget the samples of all other trunks."""
        ...

    def close(self) -> None:
        """Let go of files."""
        ...


class MemoryStore:
    """Samples in memory, each in a tensor of its own.

    Args:
        byte_budget: most bytes of all samples together.
    """

    def __init__(self, byte_budget: int) -> None:
        self.byte_budget = byte_budget
        self.evictions = 0
        self.nbytes = 0
        self._entries: OrderedDict[CacheKey, tuple[bytes, Tensor]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def open(self, shape: tuple[int, int], payload_bytes: int) -> None:
        """See :class:`Store`. Samples in memory may have any shape.

        Raises:
            UsageProblem: not even one of them fits into the budget.
        """
        require_room(payload_bytes, self.byte_budget)

    def get(self, key: CacheKey, inputs: bytes) -> Tensor | None:
        """See :class:`Store`."""
        found = self._entries.get(key)
        if found is None or found[0] != inputs:
            return None
        self._entries.move_to_end(key)
        return found[1]

    def put(self, key: CacheKey, inputs: bytes, payload_N: Tensor) -> None:
        """See :class:`Store`."""
        self.drop(key)
        while self.nbytes + payload_N.numel() > self.byte_budget:
            oldest, _ = next(iter(self._entries.items()))
            self.drop(oldest)
            self.evictions += 1
        # A copy: a view would keep the bytes of its whole batch.
        self._entries[key] = (inputs, payload_N.clone(memory_format=torch.contiguous_format))
        self.nbytes += payload_N.numel()

    def drop(self, key: CacheKey) -> None:
        """See :class:`Store`."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.nbytes -= entry[1].numel()

    def versions(self) -> set[str]:
        """See :class:`Store`."""
        return {key.version for key in self._entries}

    def keep_only(self, versions: set[str]) -> None:
        """See :class:`Store`."""
        for key in [key for key in self._entries if key.version not in versions]:
            self.drop(key)

    def close(self) -> None:
        """Forget everything."""
        self._entries.clear()
        self.nbytes = 0


def require_room(sample_bytes: int, byte_budget: int) -> None:
    """See that one sample fits.

    Raises:
        UsageProblem: it does not.
    """
    if sample_bytes > byte_budget:
        raise UsageProblem(
            f"activation cache: a budget of {byte_budget:,} bytes does not hold one sample of {sample_bytes:,}",
            "Raise the budget, take a smaller dtype, or train without the cache.",
        )
