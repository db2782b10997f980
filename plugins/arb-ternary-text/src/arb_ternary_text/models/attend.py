"""Softmax attention over prepared queries, keys and values, in the way that suits the device.

Shapes: ``B`` sequences, ``S`` queries, ``T`` keys, ``H`` query heads, ``G`` key heads, ``C``
features of a head's queries and keys, ``V`` of its values.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from arb_ternary_text.models.block_kernels import may_round_differently

#: Longest causal sequence that a CPU attends over by whole matrices in training: in exact runs and
#: compiled graphs on any processor, and where torch does not say what the processor can do.
_WHOLE_MATRIX_LENGTH: Final = 256
#: The same for bfloat16 if the processor multiplies it in tiles (AMX).
_WHOLE_MATRIX_LENGTH_TILES: Final = 512


@cache
def _bfloat16_length() -> int:
    """Return the longest sequence for whole matrices of bfloat16; 0 if x86 has no such products."""
    get_capabilities = getattr(torch.cpu, "get_capabilities", None)
    known = {} if get_capabilities is None else get_capabilities()
    if known.get("architecture") != "x86_64":
        return _WHOLE_MATRIX_LENGTH
    if known.get("amx_bf16"):
        return _WHOLE_MATRIX_LENGTH_TILES
    return _WHOLE_MATRIX_LENGTH if known.get("avx512_bf16") else 0


def whole_matrix_length(dtype: torch.dtype) -> int:
    """Return the longest causal sequence for which a CPU uses whole matrices in training.

    0 means never. In float32, torch's fused kernel takes 0.5 to 1.0 of the time of whole matrices,
    forward and backward. In bfloat16 it takes 1.1 to 4 times as long up to these lengths if the
    processor multiplies bfloat16, and 0.4 to 0.7 of the time if it does not (measured in
    benchmarks/reports/cpu-kernels.md).
    """
    if not may_round_differently() or dtype is torch.float16:
        return _WHOLE_MATRIX_LENGTH
    return _bfloat16_length() if dtype is torch.bfloat16 else 0


def attend(
    query_BHSC: Tensor,
    key_BGTC: Tensor,
    value_BGTV: Tensor,
    *,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None = None,
) -> Tensor:
    """Return softmax attention, ``[B, H, S, V]``.

    Key head ``g`` serves the query heads from ``g * H / G`` on.

    Args:
        query_BHSC: queries, of a floating dtype.
        key_BGTC: keys, of the same dtype.
        value_BGTV: values, of the same dtype.
        mask: bool ``[S, T]``, True where a query sees a key; None if ``is_causal``, or if nothing
            is hidden.
        is_causal: whether the mask is the lower triangle, with ``S == T``.
        scale: factor of the scores; None = ``1 / sqrt(C)``.
    """
    batch, heads, new, features = query_BHSC.shape
    key_heads = key_BGTC.shape[1]
    total = key_BGTC.shape[2]
    may_be_whole = is_causal and query_BHSC.device.type == "cpu" and torch.is_grad_enabled()
    if not may_be_whole or total > whole_matrix_length(query_BHSC.dtype) or heads != key_heads:
        return F.scaled_dot_product_attention(
            query_BHSC,
            key_BGTC,
            value_BGTV,
            attn_mask=mask,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=heads != key_heads,
        )

    query, key, value = (x.flatten(0, 1) for x in (query_BHSC, key_BGTC, value_BGTV))
    hidden_ST = torch.full((new, total), -math.inf, dtype=query.dtype).triu_(1)
    alpha = features**-0.5 if scale is None else scale
    scores = torch.baddbmm(hidden_ST.expand(batch * heads, new, total), query, key.mT, alpha=alpha)
    return torch.bmm(scores.softmax(dim=-1), value).view(batch, heads, new, -1)
