"""Snapshots of a loop within a memory budget; those that exceed it are files."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from arb_ternary_train.loop_state import Snapshot
from arb_ternary_train.memory import free_memory

if TYPE_CHECKING:
    from arb_ternary_train.loop import TrainingLoop

#: Folder of snapshots in the run's directory.
_FOLDER: Final = "snapshots"
#: By default snapshots may take one in this number of free bytes of memory.
_SHARE: Final = 4


class Kept:
    """A kept snapshot; see :class:`SnapshotMemory`."""

    def __init__(self, memory: SnapshotMemory, snapshot: Snapshot, path: Path | None) -> None:
        self._memory = memory
        self._snapshot = snapshot if path is None else None
        self.path = path
        self.nbytes = 0 if path is not None else snapshot.nbytes

    def get(self) -> Snapshot:
        """Return the snapshot, read from its file if it has one."""
        if self.path is not None:
            return Snapshot.read(self.path)
        if self._snapshot is None:
            raise RuntimeError("the snapshot has been released")
        return self._snapshot

    def release(self) -> None:
        """Free its memory or remove its file."""
        self._memory.used -= self.nbytes
        self._snapshot = None
        self.nbytes = 0
        if self.path is not None:
            shutil.rmtree(self.path.parent)
            self.path = None


class SnapshotMemory:
    """Keeps snapshots in the memory of the model's device, and above ``budget`` bytes on disk.

    Where a snapshot is kept has no influence on its bits. It is copied in memory before it is
    written.

    Args:
        directory: directory of the run. Its folder ``snapshots`` is removed first: a killed process
            may have left it.
        device: device of the model.
        budget: bytes; None = a quarter of what is free when the first snapshot is kept.
    """

    def __init__(self, directory: Path, device: torch.device, budget: int | None) -> None:
        self._device = device
        self.folder = directory / _FOLDER
        self.budget = budget
        self.used = 0
        self._serial = 0
        self.close()

    def take(self, loop: TrainingLoop) -> Kept:
        """Take and keep a snapshot of ``loop``."""
        return self.keep(Snapshot.take(loop))

    def keep(self, snapshot: Snapshot) -> Kept:
        """Keep ``snapshot``.

        Raises:
            CheckpointError: it has to be written, and the disk is full or refuses.
        """
        if self.budget is None:
            self.budget = free_memory(self._device) // _SHARE
        if self.used + snapshot.nbytes <= self.budget:
            kept = Kept(self, snapshot, None)
            self.used += kept.nbytes
            return kept
        self._serial += 1
        return Kept(self, snapshot, snapshot.save(self.folder / str(self._serial)))

    def close(self) -> None:
        """Remove all files."""
        if self.folder.exists():
            shutil.rmtree(self.folder)
