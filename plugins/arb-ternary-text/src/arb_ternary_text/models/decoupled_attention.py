"""Decoupled attention: scores without positions in one part of a head's features, with positions in
the other.

Of each head, queries and keys have a semantic part of ``s`` features, which no position turns, and
a geometric part of ``g`` features with the rotary embedding. For a query head ``h`` of key head
``j``, with the gate ``w_h``, the sigmoid of its logit (1 / 2 where there are no gates):

    score(t, u) = 2 w_h q_s(t) k_s(u) / sqrt(s) + (2 - 2 w_h) R(t) q_g(t) R(u) k_g(u) / sqrt(g)

Values have the features of a head; a cache holds ``s + g`` features of keys and the values. ``R``
turns pair ``p`` of the geometric features with the plane ``planes[j, p]`` of a head of
``rotary_dim`` features, so that a key head may have the frequencies that matter to it. A null key
is one more place in the softmax, which every position sees, with a semantic part alone: it has no
position.

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
    """Planes int16 ``[G, P]`` evenly among the ``rotary_dim / 2`` that there are, the same for each
    key head.

    Where ``g`` divides ``rotary_dim`` their frequencies are those of a head of ``g`` features.
    """
    count = (config.geo_dim or 0) // 2
    planes_P = torch.arange(count) * (config.rotary_features // 2) // count
    return planes_P.to(torch.int16).repeat(config.key_heads, 1)


class DecoupledAttention(nn.Module):
    """Attention whose scores are the sum of a semantic and a geometric part.

    Attributes:
        planes: int16 ``[G, P]``: the plane of each pair of geometric features, below ``rotary_dim /
            2``; pair ``p`` are the features ``p`` and ``p + P`` of a head. Saved with the model; at
            birth :func:`spread_planes`.
        gate: float ``[H]``, the logits of the gates, 0 at birth, where both parts count alike; None
            without gates.
        null_key: float ``[G s]``, and ``null_value``, float ``[G V]``; 0 at birth; None without.
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
        self.key_semantic = (
            None if config.tie_query_key else make_linear(config, width, sizes["key_semantic"])
        )
        self.key_geometric = make_linear(config, width, sizes["key_geometric"])
        self.value = make_linear(config, width, sizes["value"])
        seen_features = self.heads * config.value_features
        self.output_norm = make_sub_norm(config, seen_features)
        self.output = make_linear(config, seen_features, width)
        self.biases = Biases(sizes) if config.query_key_value_bias else None
        self.gate = nn.Parameter(torch.zeros(self.heads)) if config.attention_gate else None
        null = config.null_key_value
        self.null_key = nn.Parameter(torch.zeros(self.key_heads * self.sem_dim)) if null else None
        self.null_value = (
            nn.Parameter(torch.zeros(self.key_heads * config.value_features)) if null else None
        )
        self.register_buffer("planes", spread_planes(config))

    def forward(
        self, x_BSD: Tensor, positions: Positions, cache: LayerCache | None = None
    ) -> Tensor:
        """The update that the residual stream ``x_BSD`` gets."""
        normed_BSD = self.norm(x_BSD)
        semantic_BHSC, geometric_BHSC, key_geometric_BGTC, value_BGTV = (
            self._projected(name, normed_BSD)
            for name in ("query_semantic", "query_geometric", "key_geometric", "value")
        )
        tied = self.key_semantic is None
        key_semantic_BGTC = semantic_BHSC if tied else self._projected("key_semantic", normed_BSD)
        cos_GSP, sin_GSP = (self._own_planes(each) for each in (positions.cos, positions.sin))
        shared = self.heads // self.key_heads
        cos_HSP, sin_HSP = (each.repeat_interleave(shared, dim=0) for each in (cos_GSP, sin_GSP))
        geometric_BHSC = rotate(geometric_BHSC, cos_HSP, sin_HSP)
        key_BGTC = torch.cat(
            (key_semantic_BGTC, rotate(key_geometric_BGTC, cos_GSP, sin_GSP)), dim=-1
        )
        if cache is not None and positions.span is not None:
            key_BGTC, value_BGTV = cache.extend(key_BGTC, value_BGTV, positions.span)
        if self.null_key is not None and self.null_value is not None:
            # Its geometric part is 0, and it is not stored.
            key_BGTC = self._with_null(self.null_key, key_BGTC)
            value_BGTV = self._with_null(self.null_value, value_BGTV)
        of_semantic, of_geometric = self._factors(semantic_BHSC.dtype)
        query_BHSC = torch.cat((semantic_BHSC * of_semantic, geometric_BHSC * of_geometric), dim=-1)
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
        """The linears that write to the residual stream."""
        return [self.output]

    @torch.no_grad()
    def set_planes(self, planes: Tensor) -> None:
        """Turn the geometric features with other planes, integers ``[G, P]``.

        Raises:
            UsageProblem: another shape, or a plane that there is not.
        """
        if planes.shape != self.planes.shape:
            raise UsageProblem(
                f"planes: must be of shape {tuple(self.planes.shape)}, not {tuple(planes.shape)}"
            )
        if fault := self._fault_of(planes):
            raise UsageProblem(f"planes: {fault}")
        self.planes.copy_(planes)

    def _projected(self, name: str, normed_BSD: Tensor) -> Tensor:
        projected_BSE: Tensor = self.get_submodule(name)(normed_BSD)
        if self.biases is not None:
            projected_BSE = self.biases(name, projected_BSE)
        return split_heads(
            projected_BSE, self.heads if name.startswith("query") else self.key_heads
        )

    def _own_planes(self, angle_SP: Tensor) -> Tensor:
        """Cosines or sines of every plane as those of each key head's, ``[G, S, P]``."""
        return angle_SP[:, self.planes.to(torch.int64)].transpose(0, 1)

    def _factors(self, dtype: torch.dtype) -> tuple[Tensor | float, Tensor | float]:
        """What semantic and geometric queries are multiplied by."""
        of_semantic = 1 / math.sqrt(self.sem_dim)
        of_geometric = 1 / math.sqrt(self.geo_dim)
        if self.gate is None:
            return of_semantic, of_geometric
        doubled_H11 = (
            2
            * torch.sigmoid(self.gate.to(torch.promote_types(dtype, torch.float32)))[:, None, None]
        )
        return (doubled_H11 * of_semantic).to(dtype), ((2 - doubled_H11) * of_geometric).to(dtype)

    def _with_null(self, null: Tensor, seen_BGTC: Tensor) -> Tensor:
        batch, key_heads, _, features = seen_BGTC.shape
        null_GC = null.view(key_heads, -1)
        null_GC = F.pad(null_GC, (0, features - null_GC.size(1))).to(seen_BGTC.dtype)
        return torch.cat((null_GC[:, None].expand(batch, key_heads, 1, features), seen_BGTC), dim=2)

    def _fault_of(self, planes: Tensor) -> str | None:
        low = int(planes.min())
        high = int(planes.max())
        if low >= 0 and high < self.rotary_planes:
            return None
        wrong = low if low < 0 else high
        return (
            f"there are planes 0 to {self.rotary_planes - 1} (rotary_dim / 2 of them), and no "
            f"plane {wrong}"
        )

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, *arguments: Any
    ) -> None:
        planes = state_dict.get(prefix + "planes")
        if isinstance(planes, Tensor) and (fault := self._fault_of(planes)):
            *_, faults = arguments
            faults.append(f"{prefix}planes: {fault}")
        super()._load_from_state_dict(state_dict, prefix, *arguments)
