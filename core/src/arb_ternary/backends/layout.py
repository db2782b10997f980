"""The reference layout in flight: two bits a trit, in the byte order of GGUF TQ2_0 without its padding.

Along K, blocks of 128 weights take 32 bytes; byte ``j`` of a block holds weights ``j``, ``j + 32``, ``j + 64`` and
``j + 96`` in bits 0-1, 2-3, 4-5 and 6-7 as codes ``t + 1``. The ``R < 128`` weights that remain take
``c = ceil(R / 4)`` bytes in the same way: ``j``, ``j + c``, ``j + 2 c``, ``j + 3 c``, where those beyond the row's end
are ``t = 0``.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

__all__ = ["pack_trits", "packed_columns", "unpack_trits"]

BLOCK: Final = 128
PLANES: Final = 4


def packed_columns(columns: int) -> int:
    """Bytes that a row of ``columns`` trits takes in flight: ``ceil(K / 4)``."""
    return -(-columns // PLANES)


def pack_trits(trits_NK: Tensor) -> Tensor:
    """Pack int8 trits ``[N, K]`` into uint8 ``[N, ceil(K / 4)]``."""
    rows, columns = trits_NK.shape
    codes = torch.ones(rows, packed_columns(columns) * PLANES, dtype=torch.uint8, device=trits_NK.device)
    codes[:, :columns] = trits_NK + 1
    whole = columns // BLOCK * BLOCK
    parts = [_pack_blocks(codes[:, :whole], BLOCK)]
    if whole < columns:
        parts.append(_pack_blocks(codes[:, whole:], codes.shape[1] - whole))
    return parts[0] if whole == columns else torch.cat(parts, dim=1)


def unpack_trits(packed: Tensor, columns: int) -> Tensor:
    """Unpack uint8 ``[N, ceil(K / 4)]`` to int8 trits ``[N, K]``."""
    rows, width = packed.shape
    whole = columns // BLOCK * BLOCK
    if whole == columns:
        return _unpack_blocks(packed, BLOCK).view(rows, columns)
    trits = torch.empty(rows, columns, dtype=torch.int8, device=packed.device)
    body = whole // PLANES
    trits[:, :whole] = _unpack_blocks(packed[:, :body], BLOCK).view(rows, whole)
    rest = PLANES * (width - body)
    trits[:, whole:] = _unpack_blocks(packed[:, body:], rest).view(rows, rest)[:, : columns - whole]
    return trits


def _pack_blocks(codes: Tensor, block: int) -> Tensor:
    rows, columns = codes.shape
    planes = codes.reshape(rows, columns // block, PLANES, block // PLANES)
    packed = planes[:, :, 0] | (planes[:, :, 1] << 2) | (planes[:, :, 2] << 4) | (planes[:, :, 3] << 6)
    return packed.reshape(rows, columns // PLANES)


def _unpack_blocks(packed: Tensor, block: int) -> Tensor:
    rows, width = packed.shape
    lanes = block // PLANES
    blocks = packed.reshape(rows, width // lanes, 1, lanes)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=packed.device).view(1, 1, PLANES, 1)
    codes = (blocks >> shifts) & 3
    return codes.view(torch.int8).sub_(1).view(rows, width * PLANES)
