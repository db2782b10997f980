"""Trits packed into two bits each, as transformers stores BitNet's linears.

A matrix of ``N`` rows, a multiple of four, is uint8 ``[N / 4, K]``: row ``r + i N / 4`` is in the
bits ``2 i`` and ``2 i + 1`` of row ``r``, as the code ``t + 1``; there is no code 3.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from arb_ternary.errors import DataError

TRITS_PER_BYTE: Final = 4


def pack(trits_NK: Tensor) -> Tensor:
    """Pack int8 ``[N, K]`` in {-1, 0, 1} into uint8 ``[N / 4, K]``; raises ValueError unless four
    divides ``N``.
    """
    rows = trits_NK.shape[0]
    if rows % TRITS_PER_BYTE:
        raise ValueError(f"{rows} rows: must be a multiple of {TRITS_PER_BYTE}")
    packed = torch.zeros(rows // TRITS_PER_BYTE, trits_NK.shape[1], dtype=torch.uint8)
    for place, part in enumerate(trits_NK.chunk(TRITS_PER_BYTE)):
        packed |= (part + 1).to(torch.uint8) << 2 * place
    return packed


def unpack(packed: Tensor, where: str) -> Tensor:
    """Return the inverse of :func:`pack`; raises DataError, which begins with ``where``, for a code
    3.
    """
    quarter, columns = packed.shape
    trits = torch.empty(TRITS_PER_BYTE * quarter, columns, dtype=torch.int8)
    for place, part in enumerate(trits.view(TRITS_PER_BYTE, quarter, columns)):
        codes = (packed >> 2 * place) & 3
        if codes.numel() and int(codes.amax()) == 3:
            row, column = (int(at) for at in torch.nonzero(codes == 3)[0])
            raise DataError(
                f"{where}: the code of row {row + place * quarter}, column {column} is 3, which is "
                f"not a trit"
            )
        torch.sub(codes.view(torch.int8), 1, out=part)
    return trits
