"""Decoupled attention: scores have a part without positions and a part with positions.

The queries and keys of a head have a semantic part of ``s`` features without positions, and a
geometric part of ``g`` features with the rotary embedding. The gate ``w_h`` of query head ``h`` is
the sigmoid of its logit, or 1 / 2 without gates. For a query head ``h`` of key head ``j``:

    score(t, u) = 2 w_h q_s(t) k_s(u) / sqrt(s) + (2 - 2 w_h) R(t) q_g(t) R(u) k_g(u) / sqrt(g)

Values have ``head_dim`` features. A cache holds ``s + g`` features of keys, and the values. ``R``
turns pair ``p`` of the geometric features by plane ``planes[j, p]`` of a rotary embedding of
``rotary_dim`` features, so that each key head can have the frequencies that matter to it. A null
key is one more entry of the softmax that every position sees. It has a semantic part only, because
it has no position.

Shapes: as in :mod:`~arb_ternary_text.models.attention`, ``P = g / 2``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from arb_ternary.errors import UsageProblem
from arb_ternary_text.models.attend import attend
from arb_ternary_text.models.attention import Biases, Positions, split_heads
from arb_ternary_text.models.cache import LayerCache
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_text.models.parts import make_linear, make_norm, make_sub_norm
from arb_ternary_text.models.rotary import rotate


def spread_planes(config: DecoderConfig) -> Tensor:
    """Return planes int16 ``[G, P]`` spread evenly over all ``rotary_dim / 2``.

    They are the same for each key head. If ``g`` divides ``rotary_dim``, their frequencies are
    those of a rotary embedding of ``g`` features.
    """
    count = (config.geo_dim or 0) // 2
    planes_P = torch.arange(count) * (config.rotary_features // 2) // count
    return planes_P.to(torch.int16).repeat(config.key_heads, 1)


class DecoupledAttention(nn.Module):
    """Attention whose scores are the sum of a semantic and a geometric part.

    Attributes:
        planes: int16 ``[G, P]``, the plane of each pair of geometric features, below
            ``rotary_dim / 2``. Pair ``p`` is the features ``p`` and ``p + P`` of a head. Saved with
            the model; initially :func:`spread_planes`.
        gate: float logits of the gates ``[H]``, initially 0, so that both parts have equal weight;
            None without gates.
        null_key: float ``[G s]``, initially 0; None without a null key.
        null_value: float ``[G V]``, initially 0; None without a null key.
    """

    planes: Tensor

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.key_heads = config.key_heads
        self.sem_dim = config.sem_dim or 0
        self.geo_dim = config.geo_dim or 0
        self.rotary_planes = config.rotary_features // 2
        sizes = {
            "query_semantic": self.heads * self.sem_dim,
            "query_geometric": self.heads * self.geo_dim,
            "key_semantic": self.key_heads * self.sem_dim,
            "key_geometric": self.key_heads * self.geo_dim,
            "value": self.key_heads * config.value_features,
        }
        if config.tie_query_key:
            del sizes["key_semantic"]
        width = config.width
        self.norm = make_norm(config, width, gain=True)
        self.query_semantic = make_linear(config, width, sizes["query_semantic"])
        self.query_geometric = make_linear(config, width, sizes["query_geometric"])
        self.key_semantic = None
        if not config.tie_query_key:
            self.key_semantic = make_linear(config, width, sizes["key_semantic"])
        self.key_geometric = make_linear(config, width, sizes["key_geometric"])
        self.value = make_linear(config, width, sizes["value"])
        seen_features = self.heads * config.value_features
        self.output_norm = make_sub_norm(config, seen_features)
        self.output = make_linear(config, seen_features, width)
        self.biases = Biases(sizes) if config.query_key_value_bias else None
        self.gate = nn.Parameter(torch.zeros(self.heads)) if config.attention_gate else None
        self.null_key = None
        self.null_value = None
        if config.null_key_value:
            self.null_key = nn.Parameter(torch.zeros(self.key_heads * self.sem_dim))
            self.null_value = nn.Parameter(torch.zeros(self.key_heads * config.value_features))
        self.register_buffer("planes", spread_planes(config))

    def forward(
        self, x_BSD: Tensor, positions: Positions, cache: LayerCache | None = None
    ) -> Tensor:
        """Return the update that the residual stream ``x_BSD`` gets."""
        normed_BSD = self.norm(x_BSD)
        semantic_BHSC = self._projected("query_semantic", normed_BSD)
        geometric_BHSC = self._projected("query_geometric", normed_BSD)
        key_geometric_BGTC = self._projected("key_geometric", normed_BSD)
        value_BGTV = self._projected("value", normed_BSD)
        key_semantic_BGTC = semantic_BHSC
        if self.key_semantic is not None:
            key_semantic_BGTC = self._projected("key_semantic", normed_BSD)

        cos_GSP = self._own_planes(positions.cos)
        sin_GSP = self._own_planes(positions.sin)
        shared = self.heads // self.key_heads
        geometric_BHSC = rotate(
            geometric_BHSC,
            cos_GSP.repeat_interleave(shared, dim=0),
            sin_GSP.repeat_interleave(shared, dim=0),
        )
        key_geometric_BGTC = rotate(key_geometric_BGTC, cos_GSP, sin_GSP)
        key_BGTC = torch.cat((key_semantic_BGTC, key_geometric_BGTC), dim=-1)
        if cache is not None and positions.span is not None:
            key_BGTC, value_BGTV = cache.extend(key_BGTC, value_BGTV, positions.span)
        if self.null_key is not None and self.null_value is not None:
            # Its geometric part is 0, and it is not cached.
            key_BGTC = self._with_null(self.null_key, key_BGTC)
            value_BGTV = self._with_null(self.null_value, value_BGTV)

        semantic_factor, geometric_factor = self._factors(semantic_BHSC.dtype)
        query_BHSC = torch.cat(
            (semantic_BHSC * semantic_factor, geometric_BHSC * geometric_factor), dim=-1
        )
        seen_BHSV = attend(
            query_BHSC,
            key_BGTC,
            value_BGTV,
            mask=positions.mask,
            is_causal=positions.is_causal,
            scale=1.0,
        )
        update_BSD: Tensor = self.output(self.output_norm(seen_BHSV.transpose(1, 2).flatten(2)))
        return update_BSD

    def output_projections(self) -> list[nn.Module]:
        """Return the linears that write to the residual stream."""
        return [self.output]

    @torch.no_grad()
    def set_planes(self, planes: Tensor) -> None:
        """Turn the geometric features by other planes, integers ``[G, P]``.

        Raises:
            UsageProblem: the shape is wrong, or a plane does not exist.
        """
        if planes.shape != self.planes.shape:
            raise UsageProblem(
                f"planes: must be of shape {tuple(self.planes.shape)}, not {tuple(planes.shape)}"
            )
        if fault := self._fault_of(planes):
            raise UsageProblem(f"planes: {fault}")
        self.planes.copy_(planes)

    def _projected(self, name: str, normed_BSD: Tensor) -> Tensor:
        """Return the output of the linear ``name``, with its bias, as heads."""
        projected_BSE: Tensor = self.get_submodule(name)(normed_BSD)
        if self.biases is not None:
            projected_BSE = self.biases(name, projected_BSE)
        heads = self.heads if name.startswith("query") else self.key_heads
        return split_heads(projected_BSE, heads)

    def _own_planes(self, angle_SP: Tensor) -> Tensor:
        """Return the cosines or sines of each key head's planes, ``[G, S, P]``."""
        return angle_SP[:, self.planes.to(torch.int64)].transpose(0, 1)

    def _factors(self, dtype: torch.dtype) -> tuple[Tensor | float, Tensor | float]:
        """Return the factors of semantic and geometric queries."""
        semantic = 1 / math.sqrt(self.sem_dim)
        geometric = 1 / math.sqrt(self.geo_dim)
        if self.gate is None:
            return semantic, geometric
        logits_H = self.gate.to(torch.promote_types(dtype, torch.float32))
        doubled_H11 = 2 * torch.sigmoid(logits_H)[:, None, None]
        return (doubled_H11 * semantic).to(dtype), ((2 - doubled_H11) * geometric).to(dtype)

    def _with_null(self, null: Tensor, seen_BGTC: Tensor) -> Tensor:
        """Put the null key or value, padded with zeros, in front of the others."""
        batch, key_heads, _, features = seen_BGTC.shape
        null_GC = null.view(key_heads, -1)
        null_GC = F.pad(null_GC, (0, features - null_GC.size(1))).to(seen_BGTC.dtype)
        return torch.cat((null_GC[:, None].expand(batch, key_heads, 1, features), seen_BGTC), dim=2)

    def _fault_of(self, planes: Tensor) -> str | None:
        """Return what is wrong with the numbers of planes; None if nothing is."""
        low = int(planes.min())
        high = int(planes.max())
        if low >= 0 and high < self.rotary_planes:
            return None
        wrong = low if low < 0 else high
        last = self.rotary_planes - 1
        return f"must be 0 to {last} (there are rotary_dim / 2 planes); there is no plane {wrong}"

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, *arguments: Any
    ) -> None:
        planes = state_dict.get(prefix + "planes")
        if isinstance(planes, Tensor) and (fault := self._fault_of(planes)):
            *_, faults = arguments
            faults.append(f"{prefix}planes: {fault}")
        super()._load_from_state_dict(state_dict, prefix, *arguments)
