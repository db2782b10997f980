"""The stores of cached samples: their common base, and the one in memory.

A store maps a key to the bytes of a sample, keeps within a byte budget and drops the least recently
used samples first. ``cache_disk`` has the store on disk.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from typing import Generic, TypeVar

import torch
from attrs import frozen
from torch import Tensor

from arb_ternary.errors import UsageProblem

E = TypeVar("E")


@frozen
class CacheKey:
    """Sample and trunk: with the inputs, they decide the hidden states."""

    sample_id: int
    version: str


class Store(ABC, Generic[E]):
    """Bytes by key, least recently used first.

    Attributes:
        byte_budget: most bytes.
        evictions: samples dropped to make room.
    """

    def __init__(self, byte_budget: int) -> None:
        self.byte_budget = byte_budget
        self.evictions = 0
        self._entries: OrderedDict[CacheKey, E] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes held now."""

    @abstractmethod
    def open(self, shape: tuple[int, int], payload_bytes: int) -> None:
        """Prepare for samples of this shape (positions, width) and size.

        Raises:
            UsageProblem: a single one exceeds the budget.
        """

    @abstractmethod
    def get(self, key: CacheKey, inputs: bytes) -> Tensor | None:
        """Return the bytes of ``key``, uint8 ``[N]``, or None if there are none for these inputs.

        ``inputs`` is their digest. The sample becomes the most recently used.
        """

    @abstractmethod
    def put(self, key: CacheKey, inputs: bytes, payload_N: Tensor) -> None:
        """Store uint8 ``[N]`` for ``key``, in place of what it had."""

    @abstractmethod
    def close(self) -> None:
        """Free the memory, or close the file."""

    def drop(self, key: CacheKey) -> None:
        """Forget ``key`` if it is there."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._dropped(entry)

    def keep_only(self, versions: set[str]) -> None:
        """Forget the samples of all trunks but these."""
        for key in [key for key in self._entries if key.version not in versions]:
            self.drop(key)

    @abstractmethod
    def _dropped(self, entry: E) -> None: ...

    def _evict(self) -> None:
        self.drop(next(iter(self._entries)))
        self.evictions += 1

    def _require_room(self, sample_bytes: int) -> None:
        if sample_bytes > self.byte_budget:
            raise UsageProblem(
                f"activation cache: a budget of {self.byte_budget:,} bytes does not hold one "
                f"sample of {sample_bytes:,}",
                "Raise the budget, use a smaller dtype, or train without the cache.",
            )


class MemoryStore(Store[tuple[bytes, Tensor]]):
    """Samples of any shape in memory, each in its own tensor."""

    nbytes = 0

    def open(self, shape: tuple[int, int], payload_bytes: int) -> None:
        self._require_room(payload_bytes)

    def get(self, key: CacheKey, inputs: bytes) -> Tensor | None:
        found = self._entries.get(key)
        if found is None or found[0] != inputs:
            return None
        self._entries.move_to_end(key)
        return found[1]

    def put(self, key: CacheKey, inputs: bytes, payload_N: Tensor) -> None:
        self.drop(key)
        while self.nbytes + payload_N.numel() > self.byte_budget:
            self._evict()
        # A copy, because a view would keep its whole batch in memory.
        self._entries[key] = (inputs, payload_N.clone(memory_format=torch.contiguous_format))
        self.nbytes += payload_N.numel()

    def close(self) -> None:
        self._entries.clear()
        self.nbytes = 0

    def _dropped(self, entry: tuple[bytes, Tensor]) -> None:
        self.nbytes -= entry[1].numel()
