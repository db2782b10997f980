"""Residual streams on disk, so that a killed projection goes on at the block where it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from arb_ternary_train.durable import replacing


@frozen
class Stream:
    """A tensor for each block, of the residual stream in front of it: float32 ``[B, S, D]``, a file
    a block.

    Some sequences are read and written at a time. What is read comes from the system's page cache
    where memory suffices, and from the disk where it does not.

    Attributes:
        folder: where the files are.
        name: of the files.
        shape: ``(B, S, D)``.
        at_once: sequences that are read together.
    """

    folder: Path
    name: str
    shape: tuple[int, int, int]
    at_once: int

    def read(self, block: int, part: slice) -> Iterator[Tensor]:
        """The stream in front of ``block``, of the sequences in ``part``."""
        held = np.memmap(self._file(block), dtype=np.float32, mode="r", shape=self.shape)
        first, last, _ = part.indices(self.shape[0])
        for start in range(first, last, self.at_once):
            yield torch.from_numpy(np.array(held[start : min(start + self.at_once, last)]))

    @contextmanager
    def writing(self, block: int) -> Iterator[Callable[[Tensor], None]]:
        """A function that takes the tensor of ``block``, part after part; it is there whole or not
        at all.
        """
        with replacing(self._file(block)) as new, new.open("wb") as file:
            yield lambda part: _append(file, part)

    def forget(self, kept: int) -> None:
        """Remove the files of all blocks but ``kept``."""
        for file in self.folder.glob(f"{self.name}-*.f32"):
            if file != self._file(kept):
                file.unlink()

    def _file(self, block: int) -> Path:
        return self.folder / f"{self.name}-{block:05d}.f32"


def _append(file: BinaryIO, part: Tensor) -> None:
    file.write(part.contiguous().numpy().data)
