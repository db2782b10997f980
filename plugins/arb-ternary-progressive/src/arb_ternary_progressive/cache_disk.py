"""Store cached samples in a file of equal slots, as many as the byte budget allows.

A slot is a header and the bytes of one sample. The header has the version of the trunk, the id of
the sample, the digest of its inputs, a serial number and a checksum of everything else in the slot.
A process that is killed while it writes leaves at most one slot with a wrong checksum. Such a slot
counts as empty, so nothing needs to be flushed or repaired. Slots are written with ordinary writes,
so that a full disk is an error and not a signal, and read through a mapping.
"""

from __future__ import annotations

import errno
import hashlib
import os
import struct
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import numpy as np
import torch
from attrs import define
from torch import Tensor

from arb_ternary.errors import ArbError, UsageProblem
from arb_ternary_progressive.cache_store import CacheKey, Store
from arb_ternary_progressive.config import CacheDtype
from arb_ternary_train.directory import locked

#: Format mark, serial number (0 = empty), sample id, version of the trunk, digest of the inputs,
#: checksum.
_HEADER: Final = struct.Struct("<8sQq16s16s8s")
_MARK: Final = b"arbhid01"
#: Slots begin at multiples of this, so that the numbers in them are aligned.
_ALIGNMENT: Final = 64
_HEADER_BYTES: Final = -(-_HEADER.size // _ALIGNMENT) * _ALIGNMENT


@define
class _Slot:
    """A used slot: the digest of the inputs, and its index."""

    inputs: bytes
    index: int


class DiskStore(Store[_Slot]):
    """Samples in ``folder``; it finds what an earlier process left there.

    Samples of one shape and dtype share a file. A folder serves one process at a time.

    Args:
        folder: folder of the file; made if it is missing.
        byte_budget: largest size of the file.
        dtype: number format of the samples; part of the file's name.

    Raises:
        UsageProblem: another process uses the folder.
    """

    def __init__(self, folder: Path, byte_budget: int, dtype: CacheDtype) -> None:
        super().__init__(byte_budget)
        self.folder = folder
        self.dtype = dtype
        self._free: list[int] = []
        self._shape: tuple[int, int] | None = None
        self._payload = 0
        self._slot_bytes = 0
        self._serial = 0
        self._file = -1
        self._map: np.memmap[tuple[int], np.dtype[np.uint8]] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        self._stack = ExitStack()
        in_use = UsageProblem(
            f"activation cache: {folder} is in use by another process",
            "Give each run its own folder.",
        )
        self._stack.enter_context(locked(folder, in_use))

    @property
    def nbytes(self) -> int:
        """Bytes of the slots in use, headers included."""
        return len(self._entries) * self._slot_bytes

    def open(self, shape: tuple[int, int], payload_bytes: int) -> None:
        """Open the file of samples of ``shape`` (positions, width), and find what it holds.

        Raises:
            UsageProblem: the store is open for another shape, or one sample exceeds the budget.
        """
        if self._shape == shape:
            return
        if self._shape is not None:
            raise UsageProblem(
                f"activation cache: {self.folder} holds samples of {self._shape[0]} positions and "
                f"width {self._shape[1]}, not {shape[0]} and {shape[1]}",
                "A cache on disk holds samples of one length. Without a folder, samples are kept "
                "in memory.",
            )
        slot_bytes = _HEADER_BYTES + -(-payload_bytes // _ALIGNMENT) * _ALIGNMENT
        self._require_room(slot_bytes)
        slots = self.byte_budget // slot_bytes
        path = self.folder / f"hidden-{self.dtype}-{shape[0]}x{shape[1]}.slots"
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        self._stack.callback(os.close, self._file)
        # Sparse: only what was written takes space. A smaller budget truncates the file.
        os.ftruncate(self._file, slots * slot_bytes)
        self._map = np.memmap(path, dtype=np.uint8, mode="r", shape=(slots * slot_bytes,))
        self._shape = shape
        self._payload = payload_bytes
        self._slot_bytes = slot_bytes
        self._find(slots)

    def get(self, key: CacheKey, inputs: bytes) -> Tensor | None:
        """See ``Store``. A slot with a wrong checksum is empty."""
        slot = self._entries.get(key)
        if slot is None or slot.inputs != inputs:
            return None
        assert self._map is not None
        start = slot.index * self._slot_bytes
        header = bytes(self._map[start : start + _HEADER.size])
        payload = self._map[start + _HEADER_BYTES : start + _HEADER_BYTES + self._payload]
        if header[-8:] != _checksum(header[:-8], payload):
            self.drop(key)
            return None
        self._entries.move_to_end(key)
        return torch.from_numpy(np.array(payload))

    def put(self, key: CacheKey, inputs: bytes, payload_N: Tensor) -> None:
        """See ``Store``.

        Raises:
            ArbError: the disk is full or cannot be written.
        """
        self.drop(key)
        if not self._free:
            self._evict()
        index = self._free.pop()
        self._serial += 1
        payload = payload_N.numpy()
        head = _HEADER.pack(
            _MARK, self._serial, key.sample_id, bytes.fromhex(key.version), inputs, bytes(8)
        )[:-8]
        header = (head + _checksum(head, payload)).ljust(_HEADER_BYTES, b"\0")
        try:
            _write(self._file, header + payload.tobytes(), index * self._slot_bytes)
        except OSError as error:
            self._free.append(index)
            raise ArbError(
                f"activation cache: {self.folder}: cannot be written: {error}",
                "Free some space or lower the budget, then continue with --resume.",
            ) from error
        self._entries[key] = _Slot(inputs, index)

    def _dropped(self, entry: _Slot) -> None:
        self._free.append(entry.index)

    def close(self) -> None:
        """Close the file and release the folder; what is stored stays."""
        self._map = None
        self._stack.close()

    def _find(self, slots: int) -> None:
        """Read all headers and order the used slots by the time of their writing."""
        found = sorted(self._headers(slots), key=lambda each: each[0])
        taken: set[int] = set()
        for serial, key, slot in found:
            earlier = self._entries.pop(key, None)
            if earlier is not None:
                taken.discard(earlier.index)
            self._entries[key] = slot
            taken.add(slot.index)
            self._serial = serial
        self._free = [index for index in reversed(range(slots)) if index not in taken]

    def _headers(self, slots: int) -> Iterator[tuple[int, CacheKey, _Slot]]:
        assert self._map is not None
        for index in self._written(slots):
            start = index * self._slot_bytes
            mark, serial, sample_id, version, inputs, _ = _HEADER.unpack(
                bytes(self._map[start : start + _HEADER.size])
            )
            if mark == _MARK and serial:
                yield serial, CacheKey(sample_id, version.hex()), _Slot(inputs, index)

    def _written(self, slots: int) -> Iterator[int]:
        """Yield the slots that may have been written; most of a large file never was."""
        following = 0
        position = 0
        while following < slots:
            try:
                start = os.lseek(self._file, position, os.SEEK_DATA)
            except OSError as error:
                # Nothing was written from here on.
                if error.errno == errno.ENXIO:
                    return
                raise
            position = os.lseek(self._file, start, os.SEEK_HOLE)
            stop = min(slots, -(-position // self._slot_bytes))
            yield from range(max(following, start // self._slot_bytes), stop)
            following = stop


def _checksum(head: bytes, payload: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> bytes:
    digest = hashlib.blake2b(head, digest_size=8)
    digest.update(np.ascontiguousarray(payload).data)
    return digest.digest()


def _write(file: int, content: bytes, offset: int) -> None:
    view = memoryview(content)
    while view:
        written = os.pwrite(file, view, offset)
        view = view[written:]
        offset = offset + written
