"""Outputs of blocks, kept so that each is computed once: in memory, and beyond a budget on disk.

Shapes: ``S`` positions, ``D`` width.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final, Literal

import torch
from attrs import frozen
from torch import Tensor

from arb_ternary.errors import DataError
from arb_ternary_train.safetensors_file import SafetensorsFile, write_safetensors
from arb_ternary_upcycle.store import Store

#: Bytes that are left free on the disk.
_SPARE: Final = 1 << 28


@frozen
class Place:
    """The place in a model where an output arises.

    ``student`` and ``teacher``: the residual stream after ``level`` blocks. ``attention``: the
    update of the teacher's attention in block ``level``.
    """

    kind: Literal["student", "teacher", "attention"]
    level: int

    @property
    def folder(self) -> str:
        """Folder of the place in the cache."""
        return f"{self.kind}-{self.level:05d}"


def inputs_digest(inputs_S: Tensor) -> bytes:
    """Return 16 bytes that distinguish the inputs of a sample from others."""
    content = inputs_S.detach().cpu().contiguous().view(torch.uint8).numpy()
    return hashlib.blake2b(content.data, digest_size=16).digest()


class OutputCache:
    """Outputs by place, sample number and inputs, bit for bit as they were put in.

    The inputs are part of the key because a sample may be masked differently from epoch to epoch.

    Args:
        folder: for what exceeds the budget. Outputs that an earlier process left there are used if
            they have the same ``identity``.
        memory: most bytes of outputs in memory.
        identity: names the models that the outputs come from.
        note: called with a message when the disk is full; nothing more is kept then.
    """

    def __init__(
        self, folder: Path, memory: int, identity: str, note: Callable[[str], None]
    ) -> None:
        self._store = Store(folder, {"models": identity})
        self._free = memory
        self._note = note
        self._in_memory: dict[Path, Tensor] = {}
        self._disk_is_full = False

    def get(self, place: Place, sample: int, inputs: bytes) -> Tensor | None:
        """Return float32 ``[S, D]``, or None if it is not cached; the caller must not change it."""
        file = self._file(place, sample, inputs)
        if file in self._in_memory:
            return self._in_memory[file]
        return _read(file) if file.exists() else None

    def put(self, place: Place, sample: int, inputs: bytes, x_SD: Tensor) -> None:
        """Keep ``[S, D]`` as float32, unless memory and disk are full."""
        file = self._file(place, sample, inputs)
        kept_SD = x_SD.detach().to("cpu", torch.float32, copy=True).contiguous()
        if kept_SD.nbytes <= self._free:
            self._in_memory[file] = kept_SD
            self._free -= kept_SD.nbytes
            return
        if self._disk_is_full:
            return
        try:
            _write(file, kept_SD)
        except OSError as error:
            self._disk_is_full = True
            self._note(
                f"{self._store.folder}: no further outputs are cached, they are recomputed when "
                f"needed: {error}"
            )

    def keep_only(self, places: Collection[Place]) -> None:
        """Delete the outputs of all other places."""
        names = {place.folder for place in places}
        for file in [file for file in self._in_memory if file.parent.name not in names]:
            self._free += self._in_memory.pop(file).nbytes
        for folder in self._store.folder.iterdir():
            if folder.is_dir() and folder.name not in names:
                shutil.rmtree(folder)

    def remove(self) -> None:
        """Delete everything."""
        self._in_memory.clear()
        self._store.remove()

    def _file(self, place: Place, sample: int, inputs: bytes) -> Path:
        return self._store.folder / place.folder / f"{sample}-{inputs.hex()}.safetensors"


# A file has a digest of its content and of its name. It is written in place and not synced to the
# disk: a file that a kill or the disk has damaged counts as absent, and its output is recomputed.


def _write(file: Path, x_SD: Tensor) -> None:
    file.parent.mkdir(exist_ok=True)
    if shutil.disk_usage(file.parent).free < _SPARE + x_SD.nbytes:
        raise OSError("less than 256 MiB would be left free")
    write_safetensors(file, {"output": x_SD}, _digest(file, x_SD))


def _read(file: Path) -> Tensor | None:
    try:
        stored = SafetensorsFile(file)
        x_SD = stored["output"]
    except (DataError, KeyError):
        return None
    return x_SD if stored.metadata.get("arb_ternary") == _digest(file, x_SD) else None


def _digest(file: Path, x_SD: Tensor) -> str:
    found = hashlib.blake2b(file.name.encode(), digest_size=16)
    found.update(x_SD.numpy().data)
    return found.hexdigest()
