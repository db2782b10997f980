"""Read GGUF files (versions 2 and 3, little-endian) from untrusted sources.

The format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): ``GGUF``, version, number of
tensors, number of keys, metadata, tensor infos, padding to the alignment, tensor data.

A file is mapped, not read. Whatever it claims is compared with its size before memory is allocated.
Opening a file therefore takes memory only for its keys and names, and their number is bounded.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np
from attrs import evolve, frozen
from numpy.typing import NDArray

from arb_ternary.errors import DataError
from arb_ternary_interchange.gguf.cursor import Cursor
from arb_ternary_interchange.gguf.metadata import Metadata
from arb_ternary_interchange.gguf.tensor_types import (
    FORK_Q2_0,
    I2_S_OF_FORK,
    Q2_0,
    TYPES,
    TensorType,
)
from arb_ternary_interchange.gguf.values import Kind

MAGIC: Final = b"GGUF"
DEFAULT_ALIGNMENT: Final = 32
_MAX_ALIGNMENT: Final = 1 << 20
_MAX_TENSORS: Final = 1 << 14
_MAX_DIMENSIONS: Final = 4


@frozen(slots=True)
class TensorInfo:
    """A tensor of a file.

    Attributes:
        name: its name.
        shape: rows first: ``(N, K)`` for a matrix whose dimensions in the file are ``K, N``.
        type: how its weights are stored.
        start: its first byte in the file.
    """

    name: str
    shape: tuple[int, ...]
    type: TensorType
    start: int

    @property
    def rows(self) -> int:
        """Number of rows, which have the length of the last dimension."""
        return math.prod(self.shape[:-1])

    @property
    def size(self) -> int:
        """Size in bytes."""
        return self.rows * self.type.row_bytes(self.shape[-1])


def is_gguf(path: Path) -> bool:
    """Whether ``path`` is a file that begins as GGUF does."""
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


class GgufFile:
    """An open file.

    Attributes:
        path: the file.
        size: its size in bytes.
        metadata: values by key.
        tensors: tensors by name, in the order of the file.

    Raises:
        DataError: it cannot be read, is not GGUF, is cut short, or contradicts itself.
    """

    path: Path
    size: int
    metadata: Metadata
    tensors: Mapping[str, TensorInfo]

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise DataError(f"{path}: the file is empty") from error
        self.size = len(self._data)
        cursor = Cursor(self._data, path)
        _check_head(cursor)
        tensors = cursor.u64("the number of tensors")
        if tensors > _MAX_TENSORS:
            raise cursor.fail(f"the file claims {tensors} tensors; {_MAX_TENSORS} are the most")
        keys = cursor.u64("the number of keys")
        self.metadata = Metadata(cursor, keys)
        alignment = self._alignment()
        infos = _read_infos(cursor, tensors)
        begin = -(-cursor.position // alignment) * alignment
        placed = _placed(path, infos, begin, alignment, self.size)
        self.tensors = {info.name: info for info in placed}

    def bytes_of(
        self, info: TensorInfo, first: int = 0, last: int | None = None
    ) -> NDArray[np.uint8]:
        """Return a view of rows ``first`` to ``last`` of a tensor (exclusive; None = all): uint8
        ``[rows, bytes]``.
        """
        width = info.type.row_bytes(info.shape[-1])
        rows = (info.rows if last is None else last) - first
        view = np.frombuffer(self._data, np.uint8, rows * width, info.start + first * width)
        return view.reshape(rows, width)

    def _alignment(self) -> int:
        key = "general.alignment"
        if key not in self.metadata:
            return DEFAULT_ALIGNMENT
        value = self.metadata[key]
        valid = self.metadata.kind(key) is Kind.UINT32 and 1 <= value <= _MAX_ALIGNMENT
        if not valid or value & (value - 1):
            raise DataError(
                f"{self.path}: {key!r} has to be a power of two up to {_MAX_ALIGNMENT} (uint32)"
            )
        return int(value)


def _check_head(cursor: Cursor) -> None:
    if cursor.data[: len(MAGIC)] != MAGIC:
        raise cursor.fail(f"the file begins with {bytes(cursor.data[:4])!r}, not with {MAGIC!r}")
    cursor.skip(len(MAGIC), "the beginning of the file")
    version = cursor.u32("the version")
    if version in (2, 3):
        return
    cursor.position -= 4
    if version in (2 << 24, 3 << 24):
        raise cursor.fail("the file is big-endian; convert it with gguf-py's gguf_convert_endian")
    raise cursor.fail(f"version {version} is unknown; 2 and 3 are read")


def _read_infos(cursor: Cursor, count: int) -> Sequence[TensorInfo]:
    """Read tensor infos; ``start`` counts from the beginning of the data."""
    found: dict[str, TensorInfo] = {}
    for i in range(count):
        start = cursor.position
        name = cursor.text(f"the name of tensor {i}")
        if name in found:
            cursor.position = start
            raise cursor.fail(f"tensor {name!r} occurs twice")
        found[name] = _read_info(cursor, name)
    return list(found.values())


def _read_info(cursor: Cursor, name: str) -> TensorInfo:
    what = f"tensor {name!r}"
    count = cursor.u32(f"{what}: number of dimensions")
    if not 1 <= count <= _MAX_DIMENSIONS:
        raise cursor.fail(f"{what} has {count} dimensions; 1 to {_MAX_DIMENSIONS} are allowed")
    shape = tuple(reversed([cursor.u64(f"{what}: a dimension") for _ in range(count)]))
    if 0 in shape:
        raise cursor.fail(f"{what} has a dimension of 0: {shape}")
    number = cursor.u32(f"{what}: its type")
    if number == I2_S_OF_FORK:
        fault = cursor.fail(f"{what} is of type 36, which is I2_S of the fork bitnet.cpp")
        raise DataError(
            fault.what,
            "llama.cpp does not read this type either. Convert the model with llama.cpp's own "
            "ternary types: `llama-quantize MODEL-F16.gguf OUT.gguf TQ2_0` (or TQ1_0); or import "
            "the Hugging Face folder that the file was made from.",
        )
    if number not in TYPES:
        known = ", ".join(f"{kind.name} {kind.id}" for kind in TYPES.values())
        raise cursor.fail(f"{what} is of the unknown type {number}; known are {known}")
    offset = cursor.u64(f"{what}: its offset")
    # Compared before anything is computed with the numbers, which may have 64 bits each.
    if math.prod(shape) > 64 * len(cursor.data) or offset > len(cursor.data):
        raise cursor.fail(
            f"{what} of shape {shape} at offset {offset} is more than the file can hold"
        )
    return TensorInfo(name, shape, TYPES[number], offset)


def _placed(
    path: Path, infos: Sequence[TensorInfo], begin: int, alignment: int, size: int
) -> Sequence[TensorInfo]:
    """Return ``infos`` with their places in the file, none of which is outside it or in another
    tensor.
    """
    for info in infos:
        if info.start % alignment:
            raise DataError(
                f"{path}: tensor {info.name!r} is at offset {info.start}, no multiple of the "
                f"alignment, {alignment}"
            )
    placed = [evolve(info, start=begin + info.start) for info in infos]
    fault = _misplaced(placed, size)
    if fault is None:
        return placed
    # The fork's Q2_0 has the same number; tensors of that type end elsewhere.
    of_fork = [evolve(info, type=FORK_Q2_0 if info.type is Q2_0 else info.type) for info in placed]
    if _misplaced(of_fork, size) is None:
        return of_fork
    raise DataError(f"{path}: {fault}", "The file is damaged, or was not copied whole.")


def _misplaced(infos: Sequence[TensorInfo], size: int) -> str | None:
    """Return what is wrong with the places of tensors in a file of ``size`` bytes; None if nothing
    is.
    """
    order = sorted(infos, key=lambda info: info.start)
    next_starts = {info.name: after.start for info, after in pairwise(order)}
    for info in infos:
        kind = info.type
        columns = info.shape[-1]
        if columns % kind.block:
            return (
                f"tensor {info.name!r}: {kind.name} stores {kind.block} columns together, and "
                f"it has {columns}"
            )
        end = info.start + info.size
        if end > size:
            return f"tensor {info.name!r} ends at byte {end}, and the file at {size}"
        if end > next_starts.get(info.name, size):
            return f"tensor {info.name!r} ends at byte {end}, inside the next one"
    return None
