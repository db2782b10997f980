"""The order of rows in query and key matrices.

The decoder and Hugging Face rotate feature ``p`` of a head with feature ``p + P`` (half-split). So
do the graphs of ``qwen3`` and ``bitnet`` in llama.cpp; those of ``llama`` and ``arcee`` rotate
feature ``2 p`` with feature ``2 p + 1`` (interleaved).
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

#: Architectures whose rows are interleaved in a GGUF file.
INTERLEAVED: Final = frozenset({"llama", "arcee"})


def to_interleaved(rows: int, heads: int) -> Tensor:
    """For each row of the file, the decoder's row: ``file = ours[to_interleaved(N, heads)]``, int64
    ``[N]``.
    """
    return torch.arange(rows).view(heads, 2, rows // heads // 2).transpose(1, 2).reshape(-1)


def from_interleaved(rows: int, heads: int) -> Tensor:
    """The inverse: ``ours = file[from_interleaved(N, heads)]``."""
    return torch.arange(rows).view(heads, rows // heads // 2, 2).transpose(1, 2).reshape(-1)
