"""Residual streams on disk, so that a killed projection continues at the block where it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from arb_ternary_upcycle.store import Store


@frozen
class Stream:
    """A residual stream, or another tensor in front of each block: float32 ``[B, S, D]``.

    There is one file per block. Reading a file comes from the system's page cache if memory
    suffices.

    Attributes:
        store: where the files are.
        name: first part of the files' names.
        shape: ``(B, S, D)``.
        at_once: sequences that are read together.
    """

    store: Store
    name: str
    shape: tuple[int, int, int]
    at_once: int

    def read(self, block: int, part: slice) -> Iterator[Tensor]:
        """Read the stream in front of ``block`` for the sequences of ``part``, a few at a time."""
        file = self.store.folder / self._file(block)
        stored = np.memmap(file, dtype=np.float32, mode="r", shape=self.shape)
        first, last, _ = part.indices(self.shape[0])
        for start in range(first, last, self.at_once):
            yield torch.from_numpy(np.array(stored[start : min(start + self.at_once, last)]))

    @contextmanager
    def writing(self, block: int) -> Iterator[Callable[[Tensor], None]]:
        """Yield a function that appends sequences to the stream in front of ``block``."""
        with self.store.writing(self._file(block)) as new, new.open("wb") as file:

            def append(part: Tensor) -> None:
                file.write(part.contiguous().numpy().data)

            yield append

    def keep_only(self, block: int) -> None:
        """Delete the files of all other blocks."""
        for file in self.store.folder.glob(f"{self.name}-*.f32"):
            if file.name != self._file(block):
                file.unlink()

    def _file(self, block: int) -> str:
        return f"{self.name}-{block:05d}.f32"
