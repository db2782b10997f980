"""Files of the safetensors format, read and written one tensor at a time.

The library ``safetensors`` maps a file into memory, so that what has been read counts as the
process's own memory, and it writes only tensors that are all in memory at once. A model of billions
of weights needs neither here: one tensor at a time is in memory. The bytes written are those of the
library. Files from unknown sources are read too: the whole header is checked before any of its
sizes is used.

Format: the header's length (8 bytes, little-endian), the header as JSON (``name: {dtype, shape,
data_offsets}``, and texts under ``__metadata__``), the bytes of the tensors without gaps.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Protocol, TypeGuard

import torch
from attrs import define, field, frozen
from torch import Tensor

from arb_ternary.errors import ComponentError, DataError


class TensorParts(Protocol):
    """Tensors that are made one after another, so that they need not be in memory together."""

    def outlines(self) -> Iterable[tuple[str, Tensor]]:
        """Yield name and a tensor of the dtype and shape of each; its values are ignored."""

    def parts(self) -> Iterable[Mapping[str, Tensor]]:
        """Yield the tensors, in any order and grouping."""


# The format's names of dtypes. The library sorts tensors by dtype, in the reverse of this order.
DTYPES: Final[Mapping[str, torch.dtype]] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "C64": torch.complex64,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
}
_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}
_RANKS: Final = {dtype: rank for rank, dtype in enumerate(DTYPES.values())}

#: Longest header that the library writes and reads, in bytes.
_LONGEST_HEADER: Final = 100_000_000
# Most bytes of a header outside its strings. A tensor takes about 60 bytes; parsed, small values
# take twenty times their size in memory.
_MOST_STRUCTURE: Final = 8_000_000
#: Most dimensions of a tensor.
_MOST_AXES: Final = 16


@frozen
class StoredTensor:
    """The place of a tensor in a file.

    Attributes:
        dtype: the format's name of its dtype.
        shape: its shape.
        start: its first byte, counted from the start of the file.
        nbytes: its size in bytes.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


class SafetensorsFile(Mapping[str, Tensor]):
    """The tensors of a file by name; each is read from the disk whenever it is accessed.

    Attributes:
        path: the file.
        entries: the place of each tensor.
        metadata: the texts in the header.
    """

    def __init__(self, path: Path) -> None:
        """Read the header.

        Raises:
            DataError: the file cannot be read or is damaged; the message says what is wrong.
        """
        self.path = path
        try:
            with path.open("rb") as file:
                size = file.seek(0, 2)
                file.seek(0)
                length = int.from_bytes(file.read(8), "little")
                if size < 8 or not 2 <= length <= min(_LONGEST_HEADER, size - 8):
                    raise self._damaged(f"a header of {length} bytes in a file of {size}")
                header = file.read(length)
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}") from error
        content = self._parse(header)
        self.metadata = self._texts(content.pop("__metadata__", {}))
        begin = 8 + length
        self.entries = {name: self._entry(name, value, begin) for name, value in content.items()}
        self._check_gaps(begin, size)

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, name: str) -> Tensor:
        """Read a tensor; raises DataError if the file has changed since it was opened."""
        entry = self.entries[name]
        raw = torch.empty(entry.nbytes, dtype=torch.uint8)
        try:
            with self.path.open("rb") as file:
                file.seek(entry.start)
                done = file.readinto(raw.numpy().data)
        except OSError as error:
            raise DataError(
                f"{self.path}: tensor {name!r:.120} cannot be read: {error.strerror}"
            ) from error
        if done < entry.nbytes:
            raise self._damaged(f"tensor {name!r:.120} ends after {done} of {entry.nbytes} bytes")
        typed = raw.bool() if entry.dtype == "BOOL" else raw.view(DTYPES[entry.dtype])
        return typed.reshape(entry.shape)

    def outline(self, name: str) -> Tensor:
        """Return a tensor on the device ``meta``: dtype and shape without values."""
        entry = self.entries[name]
        return torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device="meta")

    def _damaged(self, what: str) -> DataError:
        return DataError(
            f"{self.path}: the file is damaged or truncated, or not safetensors: {what}"
        )

    def _parse(self, header: bytes) -> dict[str, Any]:
        if len(re.sub(rb'"(?:[^"\\]|\\.)*+"', b"", header)) > _MOST_STRUCTURE:
            raise self._damaged("its header lists more than any model has")
        try:
            content = json.loads(header, object_pairs_hook=_unique_keys)
        except (ValueError, RecursionError) as error:
            raise self._damaged(f"its header is not JSON: {error}") from error
        if not isinstance(content, dict):
            raise self._damaged("its header is not an object")
        return content

    def _texts(self, found: Any) -> dict[str, str]:
        if not isinstance(found, dict):
            raise self._damaged("its metadata are not texts")
        if not all(isinstance(value, str) for value in found.values()):
            raise self._damaged("its metadata are not texts")
        return found

    def _entry(self, name: str, found: Any, first: int) -> StoredTensor:
        value = found if isinstance(found, dict) else {}
        dtype = value.get("dtype")
        shape = value.get("shape")
        offsets = value.get("data_offsets")
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise self._damaged(f"tensor {name!r:.120} has the unknown dtype {dtype!r:.40}")
        if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
            raise self._damaged(f"tensor {name!r:.120} has shape {shape!r:.80} at {offsets!r:.80}")
        start, end = offsets
        if math.prod(shape) * DTYPES[dtype].itemsize != end - start:
            raise self._damaged(
                f"tensor {name!r:.120}, {dtype} of shape {shape!r:.80}, has {end - start} bytes"
            )
        return StoredTensor(dtype, tuple(shape), first + start, end - start)

    def _check_gaps(self, begin: int, size: int) -> None:
        """Raise DataError unless the tensors fill the file from byte ``begin`` to its end."""
        end = begin
        order = sorted(self.entries.items(), key=lambda item: (item[1].start, item[1].nbytes))
        for name, entry in order:
            if entry.start != end:
                raise self._damaged(
                    f"tensor {name!r:.120} begins at byte {entry.start}, the one before it ends at "
                    f"{end}"
                )
            end += entry.nbytes
        if end != size:
            raise self._damaged(f"its tensors end at byte {end}, the file has {size}")


@define
class TensorTable:
    """The header of a file that is being written: tensors that lie one behind the other.

    Attributes:
        entries: what the header says of each tensor, by name.
        size: bytes of all tensors.
    """

    entries: dict[str, dict[str, Any]] = field(factory=dict)
    size: int = 0

    def append(self, name: str, tensor: Tensor) -> None:
        """Add a tensor behind the others. Only its dtype and shape are used.

        Raises:
            ComponentError: the format has no name for its dtype.
        """
        if tensor.dtype not in _NAMES:
            raise ComponentError(f"{name}: {tensor.dtype} cannot go into a safetensors file")
        end = self.size + tensor.nbytes
        self.entries[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [self.size, end],
        }
        self.size = end

    def header(self, metadata: Mapping[str, str]) -> bytes:
        """Return the header as JSON, with ``metadata``."""
        content = {"__metadata__": dict(metadata), **self.entries}
        return json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor that is contiguous and on the CPU, without a copy."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def write_safetensors(
    path: Path,
    tensors: Mapping[str, Tensor] | TensorParts,
    metadata: str,
    on_written: Callable[[str, Tensor], None] = lambda _name, _tensor: None,
) -> None:
    """Write a file with ``metadata`` in its header. The bytes are those of the library.

    Args:
        path: the file; an existing one is overwritten.
        tensors: tensors by name, or in parts.
        metadata: any text. It is one entry because the library writes several in an order that
            changes from file to file.
        on_written: called with the name of every tensor and the tensor itself, on the CPU and
            contiguous, as it is written.

    Raises:
        OSError: the file cannot be written.
        ComponentError: the format has no name for a dtype, a tensor is not as announced, or the
            header is longer than readers accept.
    """
    parts = _WholeTensors(tensors) if isinstance(tensors, Mapping) else tensors
    outlines = dict(parts.outlines())
    table = TensorTable()
    for name in sorted(outlines, key=lambda each: (-_RANKS.get(outlines[each].dtype, 0), each)):
        table.append(name, outlines[name])

    header = table.header({"arb_ternary": metadata})
    header += b" " * (-len(header) % 8)
    if len(header) > _LONGEST_HEADER:
        raise ComponentError(
            f"{path}: its header would have {len(header):,} bytes; readers accept "
            f"{_LONGEST_HEADER:,}"
        )

    begin = 8 + len(header)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(begin + table.size)
        for part in parts.parts():
            for name, tensor in part.items():
                stored = tensor.detach().cpu().contiguous()
                if (stored.dtype, stored.shape) != (outlines[name].dtype, outlines[name].shape):
                    raise ComponentError(
                        f"{name}: {stored.dtype} {tuple(stored.shape)} is not what was announced"
                    )
                on_written(name, stored)
                file.seek(begin + table.entries[name]["data_offsets"][0])
                file.write(tensor_bytes(stored))


@frozen(eq=False)
class _WholeTensors:
    """Tensors that are all in memory, as :class:`TensorParts`."""

    tensors: Mapping[str, Tensor]

    def outlines(self) -> Iterable[tuple[str, Tensor]]:
        return self.tensors.items()

    def parts(self) -> Iterable[Mapping[str, Tensor]]:
        return ({name: tensor} for name, tensor in self.tensors.items())


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of the header; raises ValueError if a key occurs twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("it names something twice")
    return found


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    """Return whether ``value`` is a list of integers that can be sizes."""
    if not isinstance(value, list) or len(value) > _MOST_AXES:
        return False
    return all(type(item) is int and 0 <= item < 1 << 48 for item in value)
