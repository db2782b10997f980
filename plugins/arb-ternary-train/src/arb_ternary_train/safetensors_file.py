"""Files of the safetensors format, read and written one tensor at a time.

The library ``safetensors`` maps a file into memory, so that what has been read counts as the
process's own, and writes tensors that are all there at once. A model of billions of weights is read
and written here beside one of its tensors. The bytes written are those of the library. Files of
strangers are read too: the header is checked in all its parts before anything is taken for a size.

Format: the header's length (8 bytes, little-endian), the header as JSON (``name: {dtype, shape,
data_offsets}``, and texts under ``__metadata__``), the tensors' bytes without gaps.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Protocol, TypeGuard

import torch
from attrs import frozen
from torch import Tensor

from arb_ternary.errors import ComponentError, DataError


class TensorParts(Protocol):
    """Tensors that are made one after another, so that they need not be in memory together."""

    def outlines(self) -> Iterable[tuple[str, Tensor]]:
        """Name, and a tensor of the right kind and shape, of each; its numbers are not looked
        at.
        """

    def parts(self) -> Iterable[Mapping[str, Tensor]]:
        """The tensors, in any order and grouping."""


# : The format's names of the kinds of number, in the order in which the library writes them, last
# first.
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
_RANKS: Final = {name: rank for rank, name in enumerate(DTYPES)}

#: Longest header that the library writes and reads, in bytes.
_LONGEST_HEADER: Final = 100_000_000
# : Most bytes of a header outside its texts. A tensor takes about 60; small values cost Python
# twenty times their size.
_MOST_STRUCTURE: Final = 8_000_000
#: Most dimensions of a tensor.
_MOST_AXES: Final = 16


@frozen
class StoredTensor:
    """Where a tensor lies: its ``dtype`` as the format names it, and its first byte, from the start
    of the file.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


class SafetensorsFile(Mapping[str, Tensor]):
    """The tensors of a file by name, each read anew, from the disk and not mapped, when it is asked
    for.

    Attributes:
        path: the file.
        entries: where each tensor lies.
        metadata: the texts in the header.
    """

    def __init__(self, path: Path) -> None:
        """Read the header.

        Raises:
            DataError: the file cannot be read or is not whole; what is wrong is named.
        """
        self.path = path
        try:
            with path.open("rb") as file:
                size = file.seek(0, 2)
                file.seek(0)
                length = int.from_bytes(file.read(8), "little")
                if size < 8 or not 2 <= length <= min(_LONGEST_HEADER, size - 8):
                    raise self._fault(f"a header of {length} bytes in a file of {size}")
                header = file.read(length)
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}") from error
        content = self._parse(header)
        self.metadata = self._texts(content.pop("__metadata__", {}))
        self.entries = {
            name: self._entry(name, value, 8 + length) for name, value in content.items()
        }
        end = 8 + length
        for name, entry in sorted(
            self.entries.items(), key=lambda item: (item[1].start, item[1].nbytes)
        ):
            if entry.start != end:
                raise self._fault(
                    f"tensor {name!r:.120} begins at byte {entry.start}, the one before it ends at "
                    f"{end}"
                )
            end += entry.nbytes
        if end != size:
            raise self._fault(f"its tensors end at byte {end}, the file has {size}")

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, name: str) -> Tensor:
        """Read a tensor; DataError where the file has changed since."""
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
            raise self._fault(f"tensor {name!r:.120} ends after {done} of {entry.nbytes} bytes")
        typed = raw.bool() if entry.dtype == "BOOL" else raw.view(DTYPES[entry.dtype])
        return typed.reshape(entry.shape)

    def outline(self, name: str) -> Tensor:
        """A tensor without its numbers, on the device ``meta``."""
        entry = self.entries[name]
        return torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device="meta")

    def _fault(self, what: str) -> DataError:
        return DataError(
            f"{self.path}: the file is damaged or truncated, or not safetensors: {what}"
        )

    def _parse(self, header: bytes) -> dict[str, Any]:
        if len(re.sub(rb'"(?:[^"\\]|\\.)*+"', b"", header)) > _MOST_STRUCTURE:
            raise self._fault("its header lists more than any model has")
        try:
            content = json.loads(header, object_pairs_hook=_once)
        except (ValueError, RecursionError) as error:
            raise self._fault(f"its header is not JSON: {error}") from error
        if not isinstance(content, dict):
            raise self._fault("its header is not an object")
        return content

    def _texts(self, found: Any) -> dict[str, str]:
        if not isinstance(found, dict) or not all(
            isinstance(value, str) for value in found.values()
        ):
            raise self._fault("its metadata are not texts")
        return found

    def _entry(self, name: str, found: Any, first: int) -> StoredTensor:
        value = found if isinstance(found, dict) else {}
        dtype = value.get("dtype")
        shape = value.get("shape")
        offsets = value.get("data_offsets")
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise self._fault(f"tensor {name!r:.120} is of the unknown kind {dtype!r:.40}")
        if not _sizes(shape) or not _sizes(offsets) or len(offsets) != 2:
            raise self._fault(f"tensor {name!r:.120} has shape {shape!r:.80} at {offsets!r:.80}")
        start, end = offsets
        if math.prod(shape) * DTYPES[dtype].itemsize != end - start:
            raise self._fault(
                f"tensor {name!r:.120}, {dtype} of shape {shape!r:.80}, has {end - start} bytes"
            )
        return StoredTensor(dtype, tuple(shape), first + start, end - start)


def write_safetensors(
    path: Path,
    tensors: Mapping[str, Tensor] | TensorParts,
    metadata: str,
    seen: Callable[[str, Tensor], None] = lambda _name, _tensor: None,
) -> None:
    """Write a file with ``metadata`` under ``arb_ternary`` in its header; the bytes are those of
    the library.

    Args:
        path: the file; an existing one is overwritten.
        tensors: by name, or in parts.
        metadata: any text. One entry only: the library writes several in an order that changes from
            file to file.
        seen: called with every tensor, on the CPU and contiguous, as it is written.

    Raises:
        OSError: the disk refuses.
        ComponentError: a kind of number that the format does not know, or a header beyond what
            readers take.
    """
    source = _Whole(tensors) if isinstance(tensors, Mapping) else tensors
    outlines = dict(source.outlines())
    for name, tensor in outlines.items():
        if tensor.dtype not in _NAMES:
            raise ComponentError(f"{name}: {tensor.dtype} cannot go into a safetensors file")
    header: dict[str, Any] = {"__metadata__": {"arb_ternary": metadata}}
    end = 0
    for name in sorted(outlines, key=lambda each: (-_RANKS[_NAMES[outlines[each].dtype]], each)):
        tensor = outlines[name]
        start = end
        end = end + tensor.nbytes
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _LONGEST_HEADER:
        raise ComponentError(
            f"{path}: its header would have {len(text):,} bytes; readers take {_LONGEST_HEADER:,}"
        )
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
        for part in source.parts():
            for name, tensor in part.items():
                given = tensor.detach().cpu().contiguous()
                if (given.dtype, given.shape) != (outlines[name].dtype, outlines[name].shape):
                    raise ComponentError(
                        f"{name}: {given.dtype} {tuple(given.shape)} is not what was announced"
                    )
                seen(name, given)
                file.seek(8 + len(text) + header[name]["data_offsets"][0])
                file.write(given.reshape(-1).view(torch.uint8).numpy().data)


@frozen(eq=False)
class _Whole:
    """Tensors that are all there."""

    tensors: Mapping[str, Tensor]

    def outlines(self) -> Iterable[tuple[str, Tensor]]:
        return self.tensors.items()

    def parts(self) -> Iterable[Mapping[str, Tensor]]:
        return ({name: tensor} for name, tensor in self.tensors.items())


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of the header; ValueError where it names something twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("it names something twice")
    return found


def _sizes(value: Any) -> TypeGuard[list[int]]:
    """Whether ``value`` is a list of whole numbers that can be sizes."""
    return (
        isinstance(value, list)
        and len(value) <= _MOST_AXES
        and all(type(item) is int and 0 <= item < 1 << 48 for item in value)
    )
