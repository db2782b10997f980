"""Trits at rest: base 3, five trits per byte, 1.6 bits per weight.

Each row is encoded by itself: byte ``i`` of a row holds trits ``5 i .. 5 i + 4``, least significant
first, ``byte = sum((t_j + 1) * 3**j)``; the last byte of a row is padded with ``t = 0``. Bytes
243..255 are invalid. The form is independent of the backend that wrote it, so a checkpoint moves
between backends bit for bit.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from arb_ternary.errors import CheckpointError

TRITS_PER_BYTE: Final = 5
CODES: Final = 3**TRITS_PER_BYTE
#: Trits that are converted at a time: copies of a whole large matrix would outweigh the model.
_AT_ONCE: Final = 1 << 22


def bytes_per_row(columns: int) -> int:
    """Return the bytes of a row of ``columns`` trits at rest."""
    return -(-columns // TRITS_PER_BYTE)


def _powers(device: torch.device) -> Tensor:
    """Return the values of the five digits of a byte."""
    return torch.tensor([3**j for j in range(TRITS_PER_BYTE)], dtype=torch.uint8, device=device)


def encode_at_rest(trits_NK: Tensor) -> Tensor:
    """Encode int8 trits ``[N, K]`` as uint8 ``[N, ceil(K / 5)]``.

    Raises:
        ValueError: it is not an int8 matrix of trits.
    """
    if trits_NK.dim() != 2 or trits_NK.dtype != torch.int8:
        raise ValueError(
            f"trits must be an int8 matrix, got {trits_NK.dtype} of shape {tuple(trits_NK.shape)}"
        )
    rows, columns = trits_NK.shape
    width = bytes_per_row(columns)
    encoded = torch.empty(rows, width, dtype=torch.uint8, device=trits_NK.device)
    padding = (0, width * TRITS_PER_BYTE - columns)
    step = max(1, _AT_ONCE // max(columns, 1))
    for start in range(0, rows, step):
        some = slice(start, start + step)
        part = trits_NK[some]
        if part.numel() and int(part.abs().amax()) > 1:
            raise ValueError("trits must be -1, 0 or 1")
        digits = torch.nn.functional.pad(part + 1, padding, value=1).to(torch.uint8)
        values = digits.view(len(part), width, TRITS_PER_BYTE).mul_(_powers(part.device))
        torch.sum(values, dim=2, dtype=torch.uint8, out=encoded[some])
    return encoded


def decode_at_rest(encoded: Tensor, columns: int, name: str = "weight") -> Tensor:
    """Decode uint8 ``[N, ceil(K / 5)]`` to int8 trits ``[N, K]``.

    ``name`` is the name of the tensor in errors.

    Raises:
        CheckpointError: wrong dtype or shape, a byte above 242, or padding that is not zero.
    """
    width = bytes_per_row(columns)
    if encoded.dtype != torch.uint8 or encoded.dim() != 2 or encoded.shape[1] != width:
        raise CheckpointError(
            f"{name}: {columns} trits per row at rest are uint8 with {width} bytes per row, "
            f"got {encoded.dtype} of shape {tuple(encoded.shape)}"
        )
    codes = encoded.flatten()
    bad = torch.nonzero(codes >= CODES)
    if bad.numel():
        offset = int(bad[0])
        raise CheckpointError(
            f"{name}: byte {int(codes[offset])} at offset {offset} is not a code of five trits "
            f"(0..242)"
        )
    decoded = torch.empty(encoded.shape[0], columns, dtype=torch.int8, device=encoded.device)
    step = max(1, _AT_ONCE // max(columns, 1))
    for start in range(0, encoded.shape[0], step):
        some = slice(start, start + step)
        digits = encoded[some].unsqueeze(2) // _powers(encoded.device) % 3
        trits = digits.to(torch.int8).flatten(start_dim=1) - 1
        padding = trits[:, columns:]
        if bool(padding.any()):
            bad_rows = torch.nonzero(padding.any(dim=1))
            row = start + int(bad_rows[0])
            raise CheckpointError(f"{name}: padding at the end of row {row} is not zero")
        decoded[some] = trits[:, :columns]
    return decoded
