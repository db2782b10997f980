"""Safetensors files written tensor by tensor, in shards: a model of any size with the memory of one
tensor.

The header stands first in a file and names all tensors. Room is kept for it, and what it does not
need is filled with spaces, as the format allows.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from io import BufferedWriter
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from arb_ternary.errors import ComponentError
from arb_ternary_train.safetensors_file import DTYPES

SINGLE_NAME: Final = "model.safetensors"
INDEX_NAME: Final = "model.safetensors.index.json"

_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}
# : Bytes of a header's entry besides the tensor's name: dtype, two dimensions and two offsets of up
# to 15 digits.
_ENTRY_BYTES: Final = 120
_ALIGNMENT: Final = 64


def write_shards(
    folder: Path,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    names: Iterable[str],
    limit: int,
    metadata: Mapping[str, str],
) -> int:
    """Write tensors, in the order given, to ``model.safetensors``, or to several files and their
    index.

    Args:
        folder: where; it exists.
        tensors: name and tensor; each is written before the next is asked for.
        names: of all of them, known beforehand.
        limit: a file is ended before it would hold more bytes of tensors than this; one tensor may
            be larger.
        metadata: strings for each file's header.

    Returns:
        Bytes of all tensors.
    """
    room = (
        sum(len(json.dumps(name)) + _ENTRY_BYTES for name in names)
        + len(json.dumps(dict(metadata)))
        + 64
    )
    room = -(-room // _ALIGNMENT) * _ALIGNMENT - 8
    shards: list[_Shard] = []
    with ExitStack() as files:  # a file is closed whatever becomes of the tensors
        for name, tensor in tensors:
            size = tensor.numel() * tensor.element_size()
            if not shards or (shards[-1].entries and shards[-1].size + size > limit):
                if shards:
                    shards[-1].finish(metadata)
                path = folder / f"part-{len(shards)}"
                shards.append(_Shard(path, files.enter_context(path.open("wb")), room))
            shards[-1].append(name, tensor)
        for shard in shards[-1:]:
            shard.finish(metadata)
    _name(folder, shards)
    return sum(shard.size for shard in shards)


def _name(folder: Path, shards: list[_Shard]) -> None:
    """Give the shards the names that loaders look for, and write the index if there are several."""
    if len(shards) == 1:
        shards[0].path.rename(folder / SINGLE_NAME)
        return
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        final = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        shard.path.rename(folder / final)
        weight_map.update(dict.fromkeys(shard.entries, final))
    index = {
        "metadata": {"total_size": sum(shard.size for shard in shards)},
        "weight_map": weight_map,
    }
    (folder / INDEX_NAME).write_text(
        json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8"
    )


class _Shard:
    """A file that is being written."""

    def __init__(self, path: Path, file: BufferedWriter, room: int) -> None:
        self.path = path
        self.entries: dict[str, Any] = {}
        self.size = 0
        self._room = room
        self._file = file
        self._file.seek(8 + room)

    def append(self, name: str, tensor: Tensor) -> None:
        content = tensor.detach().cpu().contiguous()
        end = self.size + content.numel() * content.element_size()
        self.entries[name] = {
            "dtype": _NAMES[content.dtype],
            "shape": list(content.shape),
            "data_offsets": [self.size, end],
        }
        self._file.write(content.flatten().view(torch.uint8).numpy().data)
        self.size = end

    def finish(self, metadata: Mapping[str, str]) -> None:
        header = json.dumps(
            {"__metadata__": dict(metadata), **self.entries}, separators=(",", ":")
        ).encode()
        if len(header) > self._room:
            raise ComponentError(
                f"{self.path}: the header needs {len(header)} bytes, and {self._room} were kept "
                f"for it"
            )
        self._file.seek(0)
        self._file.write(self._room.to_bytes(8, "little") + header.ljust(self._room))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
