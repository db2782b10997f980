"""Safetensors files, read one tensor at a time after everything that their header says has been checked.

The format: 8 bytes, the length of the header (little-endian); the header, a JSON object from names to
``{"dtype", "shape", "data_offsets"}``, with strings under ``__metadata__``; then the tensors' bytes, without gap and
without overlap. A file is read and not mapped: one that another program cuts short while it is read is an error here,
and what was read does not stay resident.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from attrs import frozen
from torch import Tensor

from arb_ternary.errors import DataError
from arb_ternary_hf.json_file import parse_object

__all__ = ["DTYPES", "Entry", "SafetensorsFile"]

#: The dtypes of the format that torch has too. Those of less than a byte are in no file that is read here.
DTYPES: Final[Mapping[str, torch.dtype]] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}

#: Longest header. Some hundred bytes a tensor: models of a hundred thousand tensors have shorter ones.
_MAX_HEADER: Final = 16 << 20
_LENGTH_BYTES: Final = 8
_MAX_DIMENSIONS: Final = 8


@frozen
class Entry:
    """A tensor of the file: its dtype in the format's words, its shape, and its first and one-past-last byte."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@frozen
class SafetensorsFile:
    """A safetensors file whose header has been checked.

    Attributes:
        path: the file.
        entries: the tensors by name.
        metadata: what stands under ``__metadata__``.
    """

    path: Path
    entries: Mapping[str, Entry]
    metadata: Mapping[str, str]

    @classmethod
    def open(cls, path: Path) -> SafetensorsFile:
        """Read and check the header.

        Raises:
            DataError: the file is missing, truncated, or its header does not describe its bytes; the tensor is named
                where there is one.
        """
        if not path.is_file():
            raise DataError(f"{path}: cannot be read: there is no such file")
        try:
            size = path.stat().st_size
            with path.open("rb") as file:
                length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
                if size < _LENGTH_BYTES or length > min(size - _LENGTH_BYTES, _MAX_HEADER):
                    raise DataError(
                        f"{path}: is no safetensors file, or truncated: a header of {length} bytes in {size}"
                    )
                text = file.read(length)
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}") from error
        header = parse_object(text, f"{path}: the header")
        metadata = header.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(type(value) is str for value in metadata.values()):
            raise DataError(f"{path}: the header's '__metadata__' must hold strings only")
        first = _LENGTH_BYTES + length
        entries = {name: _entry(path, name, value, first, size) for name, value in header.items()}
        _check_cover(path, entries, first, size)
        return cls(path, entries, metadata)

    def read(self, name: str) -> Tensor:
        """A tensor of the file, in memory of its own. DataError: the file has become shorter, or cannot be read."""
        entry = self.entries[name]
        content = torch.empty(entry.end - entry.start, dtype=torch.uint8)
        try:
            with self.path.open("rb") as file:
                file.seek(entry.start)
                # A file object fills a buffer as far as the file reaches.
                got = file.readinto(content.numpy().data) if content.numel() else 0
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read: {error.strerror}") from error
        if got != content.numel():
            raise DataError(f"{self.path}: tensor {name!r}: the file ends {content.numel() - got} bytes too early")
        return content.view(DTYPES[entry.dtype]).view(entry.shape)


def _entry(path: Path, name: str, value: Any, first: int, size: int) -> Entry:
    where = f"{path}: tensor {name[:120]!r}"
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise DataError(f"{where}: must have dtype, shape and data_offsets, and nothing else")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise DataError(f"{where}: dtype {str(dtype)[:40]!r} is none of {', '.join(DTYPES)}")
    if not (_whole(shape) and len(shape) <= _MAX_DIMENSIONS):
        raise DataError(f"{where}: shape must be at most {_MAX_DIMENSIONS} whole numbers, not {str(shape)[:80]}")
    if not (_whole(offsets) and len(offsets) == 2 and offsets[0] <= offsets[1]):
        raise DataError(f"{where}: data_offsets must be a begin and an end, not {str(offsets)[:80]}")
    start, end = first + offsets[0], first + offsets[1]
    if end > size:
        raise DataError(f"{where}: ends at byte {end} of a file of {size}: the file is truncated")
    needed = math.prod(shape) * DTYPES[dtype].itemsize
    if end - start != needed:
        raise DataError(f"{where}: {dtype} {list(shape)} takes {needed} bytes, and data_offsets give {end - start}")
    return Entry(dtype, tuple(shape), start, end)


def _whole(value: Any) -> bool:
    return isinstance(value, list) and all(type(number) is int and number >= 0 for number in value)


def _check_cover(path: Path, entries: Mapping[str, Entry], first: int, size: int) -> None:
    """Every byte after the header belongs to one tensor."""
    reached = first
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.start != reached:
            fault = "overlaps the tensor before it" if entry.start < reached else "leaves a gap before it"
            raise DataError(f"{path}: tensor {name[:120]!r}: {fault}: begins at byte {entry.start}, not {reached}")
        reached = entry.end
    if reached != size:
        raise DataError(f"{path}: {size - reached} bytes at the end belong to no tensor")
