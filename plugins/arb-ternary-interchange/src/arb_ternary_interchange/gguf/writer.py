"""Write GGUF files, version 3, one tensor at a time.

The package ``gguf`` is not used for this: it refuses empty arrays and does not know Q2_0.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from arb_ternary.errors import ArbError, DataError
from arb_ternary_interchange.gguf.reader import DEFAULT_ALIGNMENT, MAGIC
from arb_ternary_interchange.gguf.tensor_types import TensorType
from arb_ternary_interchange.gguf.values import Kind, Scalar, Value, encode, encode_string
from arb_ternary_train.durable import replacing

_VERSION: Final = 3

#: llama.cpp's GGML_MAX_NAME, less the byte that ends a string in C.
_LONGEST_NAME: Final = 63


@frozen
class PlannedTensor:
    """A tensor that will be written.

    Attributes:
        name: its name.
        shape: rows first; the last dimension is a multiple of the type's block.
        type: how its weights are stored.
        chunks: returns its bytes in order; called once, when they are written.
    """

    name: str
    shape: tuple[int, ...]
    type: TensorType
    chunks: Callable[[], Iterable[NDArray[np.uint8]]]

    @property
    def size(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape[:-1]) * self.type.row_bytes(self.shape[-1])


def write_gguf(
    path: Path,
    metadata: Mapping[str, Value],
    tensors: Sequence[PlannedTensor],
    *,
    alignment: int = DEFAULT_ALIGNMENT,
) -> None:
    """Write a file. A file of the same name is replaced once the new one is complete.

    Args:
        path: the file.
        metadata: values by key; ``general.alignment`` is added if it is not 32.
        tensors: the tensors in the order of the file.
        alignment: alignment of the tensors' first bytes; a power of two.

    Raises:
        ArbError: the file cannot be written.
        DataError: a name is too long or occurs twice, or a value does not fit its kind.
    """
    if alignment != DEFAULT_ALIGNMENT:
        metadata = {**metadata, "general.alignment": Scalar(Kind.UINT32, alignment)}
    header = _header(metadata, tensors, alignment)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as new, new.open("wb") as file:
            file.write(header)
            file.write(bytes(-len(header) % alignment))
            for tensor in tensors:
                written = 0
                for chunk in tensor.chunks():
                    written += file.write(np.ascontiguousarray(chunk).data)
                if written != tensor.size:
                    raise ArbError(
                        f"{path}: tensor {tensor.name!r} gave {written} bytes instead of "
                        f"{tensor.size}"
                    )
                file.write(bytes(-written % alignment))
    except OSError as error:
        raise ArbError(f"{path}: cannot be written: {error}") from error


def _header(
    metadata: Mapping[str, Value], tensors: Sequence[PlannedTensor], alignment: int
) -> bytes:
    parts = [MAGIC, struct.pack("<IQQ", _VERSION, len(tensors), len(metadata))]
    for key, value in metadata.items():
        parts.append(encode_string(key))
        parts.append(encode(value))
    offset = 0
    seen: set[str] = set()
    for tensor in tensors:
        if len(tensor.name.encode()) > _LONGEST_NAME:
            raise DataError(
                f"tensor {tensor.name!r}: llama.cpp reads names of up to {_LONGEST_NAME} bytes"
            )
        if tensor.name in seen:
            raise DataError(f"tensor {tensor.name!r} occurs twice")
        seen.add(tensor.name)
        parts.append(encode_string(tensor.name))
        parts.append(struct.pack("<I", len(tensor.shape)))
        parts += [struct.pack("<Q", size) for size in reversed(tensor.shape)]
        parts.append(struct.pack("<IQ", tensor.type.id, offset))
        offset += -(-tensor.size // alignment) * alignment
    return b"".join(parts)
