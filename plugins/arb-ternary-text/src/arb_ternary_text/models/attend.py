"""Softmax attention over queries, keys and values that are ready: which way a device computes it.

Shapes: ``B`` sequences, ``S`` queries, ``T`` keys, ``H`` query heads, ``G`` key heads, ``C`` features of a head's
queries and keys, ``V`` of its values.
"""

from __future__ import annotations

import math
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["attend"]

#: Longest causal sequence that a CPU attends over by whole matrices: there, torch's fused kernel is three times slower
#: in training (forward and backward, bfloat16, heads of 64), and the scores still fit the cache.
_WHOLE_MATRIX_LENGTH: Final = 256


def attend(
    query_BHSC: Tensor,
    key_BGTC: Tensor,
    value_BGTV: Tensor,
    *,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None = None,
) -> Tensor:
    """Softmax attention, ``[B, H, S, V]``; key head ``g`` serves the query heads from ``g * H / G`` on.

    Args:
        query_BHSC, key_BGTC, value_BGTV: of one floating dtype.
        mask: bool ``[S, T]``, True where a query sees a key; None when ``is_causal`` or nothing is hidden.
        is_causal: the plain lower triangle, ``S == T``.
        scale: what scores are multiplied by; None = ``1 / sqrt(C)``.
    """
    batch, heads, new, features = query_BHSC.shape
    key_heads, total = key_BGTC.shape[1], key_BGTC.shape[2]
    whole = query_BHSC.device.type == "cpu" and is_causal and torch.is_grad_enabled()
    if not whole or total > _WHOLE_MATRIX_LENGTH or heads != key_heads:
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
