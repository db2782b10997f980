"""The reference layout in flight: two bits a trit, in the byte order of GGUF TQ2_0.

Along K, superblocks of 128 weights take 32 bytes; byte ``j`` of a superblock holds weights ``j``, ``j + 32``,
``j + 64`` and ``j + 96`` in bits 0-1, 2-3, 4-5 and 6-7 as codes ``t + 1``. Rows are padded to whole superblocks with
``t = 0``.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

__all__ = ["pack_trits", "packed_columns", "unpack_trits"]

SUPERBLOCK: Final = 128
LANES: Final = 32
PLANES: Final = 4


def packed_columns(columns: int) -> int:
    """Bytes that a row of ``columns`` trits takes in flight."""
    return -(-columns // SUPERBLOCK) * LANES


def pack_trits(trits_NK: Tensor) -> Tensor:
    """Pack int8 trits ``[N, K]`` into uint8 ``[N, 32 * ceil(K / 128)]``."""
    rows, columns = trits_NK.shape
    width = packed_columns(columns)
    codes = torch.ones(rows, width * PLANES, dtype=torch.uint8, device=trits_NK.device)
    codes[:, :columns] = trits_NK + 1
    planes = codes.view(rows, width // LANES, PLANES, LANES)
    packed = planes[:, :, 0] | (planes[:, :, 1] << 2) | (planes[:, :, 2] << 4) | (planes[:, :, 3] << 6)
    return packed.reshape(rows, width)


def unpack_trits(packed: Tensor, columns: int) -> Tensor:
    """Unpack uint8 ``[N, 32 * ceil(K / 128)]`` to int8 trits ``[N, K]``."""
    rows = packed.shape[0]
    blocks = packed.view(rows, packed.shape[1] // LANES, 1, LANES)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=packed.device).view(1, 1, PLANES, 1)
    codes = (blocks >> shifts) & 3
    trits = codes.view(torch.int8).sub_(1).view(rows, packed.shape[1] * PLANES)
    return trits if trits.shape[1] == columns else trits[:, :columns].contiguous()
