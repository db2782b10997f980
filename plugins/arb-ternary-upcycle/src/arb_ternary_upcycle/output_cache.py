"""What blocks give samples, kept so that it is computed once: in memory, and beyond a budget in the
run's directory.

A sample is known by its id, and by the digest of its inputs: one that is masked otherwise than
before is not there. On disk every entry has a digest of its own; one that a kill or the disk has
damaged is not there either. What is given back has the bits of what was put in. Shapes: ``S``
positions, ``D`` width.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import struct
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final, Literal

import torch
from attrs import define, field, frozen
from torch import Tensor

Kind = Literal["student", "teacher", "attention"]

# : Format mark, sample id, digest of the inputs, positions, width, digest of everything before and
# of the numbers.
_HEADER: Final = struct.Struct("<8sq16sII16s")
_MARK: Final = b"arbout01"
#: Bytes that are left free on the disk.
_SPARE: Final = 1 << 28


@frozen
class Place:
    """Whose output: the residual stream after ``level`` blocks of ``student`` or ``teacher``; or,
    of ``attention``, the update of the teacher's attention in block ``level``.
    """

    kind: Kind
    level: int


def inputs_digest(inputs_S: Tensor) -> bytes:
    """16 bytes that tell the inputs of a sample from others."""
    content = inputs_S.detach().cpu().contiguous().view(torch.uint8).numpy()
    return hashlib.blake2b(content.data, digest_size=16).digest()


@define
class _Table:
    """The entries of one place: float32 ``[S, D]`` in memory, or where they begin in a file."""

    held: dict[tuple[int, bytes], Tensor] = field(factory=dict)
    offsets: dict[tuple[int, bytes], int] = field(factory=dict)
    file: int | None = None
    end: int = 0


class OutputCache:
    """Outputs by place, sample and inputs.

    Args:
        folder: for what does not fit; made when it is needed. What an earlier process has left
            there is used if it is of the same ``identity``.
        memory: most bytes of numbers in memory.
        identity: of the models whose outputs these are.
        note: hears that the disk is full; nothing more is kept then.
    """

    def __init__(
        self, folder: Path, memory: int, identity: str, note: Callable[[str], None]
    ) -> None:
        self._folder = folder
        self._free = memory
        self._note = note
        self._identity = hashlib.blake2b(identity.encode(), digest_size=8).hexdigest()
        self._tables: dict[Place, _Table] = {}
        self._disk_is_full = False

    def get(self, place: Place, sample: int, inputs: bytes) -> Tensor | None:
        """Float32 ``[S, D]``, or None; do not change it."""
        table = self._table(place)
        key = (sample, inputs)
        found = table.held.get(key)
        if found is None and key in table.offsets:
            found = self._read(table, key)
        return found

    def put(self, place: Place, sample: int, inputs: bytes, x_SD: Tensor) -> None:
        """Keep float ``[S, D]``, as float32; nothing happens where memory and disk are full."""
        table = self._table(place)
        key = (sample, inputs)
        kept_SD = x_SD.detach().to("cpu", torch.float32, copy=True).contiguous()
        if kept_SD.nbytes <= self._free:
            table.held[key] = kept_SD
            self._free -= kept_SD.nbytes
        elif not self._disk_is_full:
            self._write(place, table, key, kept_SD)

    def keep_only(self, places: Collection[Place]) -> None:
        """Forget all other places."""
        for place in [*self._tables]:
            if place not in places:
                table = self._tables.pop(place)
                self._free += sum(tensor.nbytes for tensor in table.held.values())
                self._close(table)
        names = {self._path(place).name for place in places}
        for path in self._folder.glob("*.outputs"):
            if path.name not in names:
                path.unlink()

    def close(self) -> None:
        """Let go of memory and files; the files stay for a run that goes on."""
        for table in self._tables.values():
            self._close(table)
        self._tables.clear()

    def remove(self) -> None:
        """Close, and delete what is on the disk."""
        self.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    # --- files: entries one after the other

    def _path(self, place: Place) -> Path:
        return self._folder / f"{place.kind}-{place.level:05d}-{self._identity}.outputs"

    def _table(self, place: Place) -> _Table:
        table = self._tables.get(place)
        if table is None:
            table = self._tables[place] = _Table()
            path = self._path(place)
            if path.exists():
                table.file = os.open(path, os.O_RDWR)
                self._find(table)
        return table

    def _find(self, table: _Table) -> None:
        """The entries of a file up to the first that is not whole, which the next one replaces."""
        assert table.file is not None
        size = os.fstat(table.file).st_size
        while len(head := os.pread(table.file, _HEADER.size, table.end)) == _HEADER.size:
            mark, sample, inputs, positions, width, _ = _HEADER.unpack(head)
            following = table.end + _HEADER.size + 4 * positions * width
            if mark != _MARK or following > size:
                return
            table.offsets[sample, inputs] = table.end
            table.end = following

    def _read(self, table: _Table, key: tuple[int, bytes]) -> Tensor | None:
        assert table.file is not None
        offset = table.offsets[key]
        head = os.pread(table.file, _HEADER.size, offset)
        _, _, _, positions, width, digest = _HEADER.unpack(head)
        numbers = bytearray(os.pread(table.file, 4 * positions * width, offset + _HEADER.size))
        if len(numbers) != 4 * positions * width or digest != _digest(head[:-16], numbers):
            del table.offsets[key]
            return None
        return torch.frombuffer(numbers, dtype=torch.float32).view(positions, width)

    def _write(self, place: Place, table: _Table, key: tuple[int, bytes], x_SD: Tensor) -> None:
        numbers = memoryview(x_SD.numpy().tobytes())
        try:
            if table.file is None:
                self._folder.mkdir(parents=True, exist_ok=True)
                table.file = os.open(self._path(place), os.O_RDWR | os.O_CREAT, 0o644)
            if shutil.disk_usage(self._folder).free < _SPARE + len(numbers):
                raise OSError("less than 256 MiB would be left free")
            head = _HEADER.pack(_MARK, key[0], key[1], x_SD.size(0), x_SD.size(1), bytes(16))[:-16]
            entry = memoryview(head + _digest(head, numbers) + numbers)
            written = 0
            while written < len(entry):
                written += os.pwrite(table.file, entry[written:], table.end + written)
        except OSError as error:
            self._disk_is_full = True
            self._note(
                f"{self._folder}: cannot hold more of the cache, the rest is computed as it is "
                f"needed: {error}"
            )
            return
        table.offsets[key] = table.end
        table.end += len(entry)

    def _close(self, table: _Table) -> None:
        if table.file is not None:
            os.close(table.file)
            table.file = None


def _digest(head: bytes, numbers: bytes | bytearray | memoryview) -> bytes:
    found = hashlib.blake2b(head, digest_size=16)
    found.update(numbers)
    return found.digest()
