"""Where cached samples lie: what memory and disk have in common, and memory. The form on disk is in
``cache_disk``.

A store maps a key to the bytes of a sample, keeps to a byte budget and drops what was used least
recently.
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
    """What a sample's hidden states depend on besides its inputs: which sample, and which trunk."""

    sample_id: int
    version: str


class Store(ABC, Generic[E]):
    """Bytes by key, least recently used first.

    Attributes:
        byte_budget: most bytes.
        evictions: samples dropped for want of room.
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
        """The samples to come have this shape (positions, width) and so many bytes.

        Raises:
            UsageProblem: not even one of them fits into the budget.
        """

    @abstractmethod
    def get(self, key: CacheKey, inputs: bytes) -> Tensor | None:
        """uint8 ``[N]`` stored under ``key`` for these inputs (their digest), or None; it is then
        the newest in use.
        """

    @abstractmethod
    def put(self, key: CacheKey, inputs: bytes, payload_N: Tensor) -> None:
        """Store uint8 ``[N]`` in place of what the key had."""

    @abstractmethod
    def close(self) -> None:
        """Let go of memory or file."""

    def drop(self, key: CacheKey) -> None:
        """Forget ``key``; nothing happens where there is none."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._dropped(entry)

    def keep_only(self, versions: set[str]) -> None:
        """Forget the samples of all other trunks."""
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
                "Raise the budget, take a smaller dtype, or train without the cache.",
            )


class MemoryStore(Store[tuple[bytes, Tensor]]):
    """Samples of any shape in memory, each in a tensor of its own."""

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
        # A copy: a view would keep the bytes of its whole batch.
        self._entries[key] = (inputs, payload_N.clone(memory_format=torch.contiguous_format))
        self.nbytes += payload_N.numel()

    def close(self) -> None:
        self._entries.clear()
        self.nbytes = 0

    def _dropped(self, entry: tuple[bytes, Tensor]) -> None:
        self.nbytes -= entry[1].numel()
