"""Safetensors files of a model of any size, written one tensor at a time: one file, or several with
an index.

The header is at the start of a file and names all its tensors. Space is kept for it, and what it
does not need is filled with blanks, as the format allows.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from io import BufferedWriter
from pathlib import Path
from typing import Final

from torch import Tensor

from arb_ternary.errors import ComponentError
from arb_ternary_train.safetensors_file import TensorTable, tensor_bytes

SINGLE_NAME: Final = "model.safetensors"
INDEX_NAME: Final = "model.safetensors.index.json"

#: Bytes of a header's entry besides the tensor's name: dtype, two dimensions and two offsets of up
#: to 15 digits.
_ENTRY_BYTES: Final = 120
_ALIGNMENT: Final = 64


def write_shards(
    folder: Path,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    names: Iterable[str],
    limit: int,
    metadata: Mapping[str, str],
) -> None:
    """Write tensors, in the order given, to ``model.safetensors``, or to several files and their
    index.

    Args:
        folder: a folder that exists.
        tensors: names and tensors; each is written before the next is asked for.
        names: the names of all tensors, known beforehand; further names do no harm.
        limit: most bytes of tensors in a file; a single tensor may be larger.
        metadata: strings for each file's header.
    """
    header_size = _header_size(names, metadata)
    shards: list[_Shard] = []
    with ExitStack() as files:  # closes the files whatever happens to the tensors
        for name, tensor in tensors:
            content = tensor.detach().cpu().contiguous()
            if not shards or not shards[-1].has_space(content.nbytes, limit):
                if shards:
                    shards[-1].finish(metadata)
                path = folder / f"part-{len(shards)}"
                shards.append(_Shard(path, files.enter_context(path.open("wb")), header_size))
            shards[-1].append(name, content)
        if shards:
            shards[-1].finish(metadata)
    _rename(folder, shards)


def _header_size(names: Iterable[str], metadata: Mapping[str, str]) -> int:
    """Return the bytes that a header with these names needs at most."""
    entries = sum(len(json.dumps(name)) + _ENTRY_BYTES for name in names)
    size = entries + len(json.dumps(dict(metadata))) + 64
    # With the eight bytes of its length, the header ends at a multiple of the alignment.
    return -(-size // _ALIGNMENT) * _ALIGNMENT - 8


def _rename(folder: Path, shards: list[_Shard]) -> None:
    """Give the files the names that loaders look for, and write the index if there are several."""
    if len(shards) == 1:
        shards[0].path.rename(folder / SINGLE_NAME)
        return
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        final = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        shard.path.rename(folder / final)
        weight_map.update(dict.fromkeys(shard.table.entries, final))
    index = {
        "metadata": {"total_size": sum(shard.table.size for shard in shards)},
        "weight_map": weight_map,
    }
    text = json.dumps(index, indent=2, sort_keys=True)
    (folder / INDEX_NAME).write_text(text + "\n", encoding="utf-8")


class _Shard:
    """A file that is being written."""

    def __init__(self, path: Path, file: BufferedWriter, header_size: int) -> None:
        self.path = path
        self.table = TensorTable()
        self._header_size = header_size
        self._file = file
        self._file.seek(8 + header_size)

    def has_space(self, nbytes: int, limit: int) -> bool:
        """Whether the file is empty or stays within ``limit`` with ``nbytes`` more."""
        return not self.table.entries or self.table.size + nbytes <= limit

    def append(self, name: str, content: Tensor) -> None:
        self.table.append(name, content)
        self._file.write(tensor_bytes(content))

    def finish(self, metadata: Mapping[str, str]) -> None:
        header = self.table.header(metadata)
        if len(header) > self._header_size:
            raise ComponentError(
                f"{self.path}: the header needs {len(header)} bytes, and {self._header_size} were "
                f"kept for it"
            )
        self._file.seek(0)
        self._file.write(self._header_size.to_bytes(8, "little"))
        self._file.write(header.ljust(self._header_size))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
