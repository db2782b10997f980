"""Softmax attention over queries, keys and values that are ready: which way a device computes it.

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

# : Longest causal sequence that a CPU attends over by whole matrices in training, in exact runs and
# compiled graphs on : any processor, and where torch does not say what the processor can do.
_WHOLE_MATRIX_LENGTH: Final = 256
#: The same for bfloat16 where the processor multiplies it in tiles.
_WHOLE_MATRIX_LENGTH_TILES: Final = 512


@cache
def _bfloat16_length() -> int:
    """Longest sequence for whole matrices of bfloat16; 0 where x86 has no products of it."""
    ask = getattr(torch.cpu, "get_capabilities", None)
    known = {} if ask is None else ask()
    if known.get("architecture") != "x86_64":
        return _WHOLE_MATRIX_LENGTH
    if known.get("amx_bf16"):
        return _WHOLE_MATRIX_LENGTH_TILES
    return _WHOLE_MATRIX_LENGTH if known.get("avx512_bf16") else 0


def whole_matrix_length(dtype: torch.dtype) -> int:
    """Longest causal sequence of ``dtype`` over which a CPU attends by whole matrices in training;
    0 = none.

    Forward and backward of torch's fused kernel take 0.5 to 1.0 of the time of whole matrices in
    float32. In bfloat16 they take 1.1 to 4 times as long up to these lengths, where the processor
    multiplies it, and 0.4 to 0.7 of it where it does not: report cpu-kernels.md.
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
    """Softmax attention, ``[B, H, S, V]``; key head ``g`` serves the query heads from ``g * H / G``
    on.

    Args:
        query_BHSC, key_BGTC, value_BGTV: of one floating dtype.
        mask: bool ``[S, T]``, True where a query sees a key; None when ``is_causal`` or nothing is
            hidden.
        is_causal: the plain lower triangle, ``S == T``.
        scale: what scores are multiplied by; None = ``1 / sqrt(C)``.
    """
    batch, heads, new, features = query_BHSC.shape
    key_heads = key_BGTC.shape[1]
    total = key_BGTC.shape[2]
    whole = query_BHSC.device.type == "cpu" and is_causal and torch.is_grad_enabled()
    if not whole or total > whole_matrix_length(query_BHSC.dtype) or heads != key_heads:
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
