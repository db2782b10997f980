"""Grouped-query attention with rotary positions, an optional sliding window and an optional cache.

It is computed by modules and torch's operations, or, if the backend has the kernels, as a native
block (:mod:`~arb_ternary_text.models.native_block`).

Shapes: ``B`` sequences, ``S`` new positions, ``T`` positions that they may see, ``H`` query heads,
``G`` key heads, ``C`` features of a head's queries and keys, ``V`` features of its values (``C``,
unless attention is decoupled), ``P = C / 2`` planes of rotation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from arb_ternary_text.models import native_block
from arb_ternary_text.models.attend import attend
from arb_ternary_text.models.block_kernels import Kernels, kernels_for
from arb_ternary_text.models.cache import LayerCache, Span
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_text.models.parts import make_head_norm, make_linear, make_norm, make_sub_norm
from arb_ternary_text.models.rotary import rotary_angles, rotate
from arb_ternary_text.models.shared_rows import multiply_all

_NO_NORM: Final = nn.Identity()
#: Longest sequence for which the attention kernels were measured to be faster than torch's
#: (benchmarks/reports/cpu-kernels.md).
_LONGEST: Final = 2048


class Positions(NamedTuple):
    """The positions of a pass as every layer needs them; computed once by the decoder.

    Attributes:
        cos: cosines of the rotation of the new positions, ``[S, P]``. Decoupled attention takes its
            planes from them.
        sin: the sines.
        mask: bool ``[S, T]``, True where a new position sees another; None if ``is_causal``, or if
            nothing is hidden. A null key is the first of ``T``.
        is_causal: whether the mask is the lower triangle, for which attention has kernels that need
            no mask.
        span: where a cache stores the new positions; None without a cache.
    """

    cos: Tensor
    sin: Tensor
    mask: Tensor | None
    is_causal: bool
    span: Span | None = None


def visibility(
    new: int, total: int, window: int | None, *, causal: bool, device: torch.device
) -> tuple[Tensor | None, bool]:
    """Return mask and ``is_causal`` of :class:`Positions`, for the last ``new`` of ``total``.

    Each position sees at most ``window`` positions, itself included; None = all.
    """
    if not causal:
        return None, False
    hides_past = window is not None and total > window
    if new == 1 and not hides_past:
        return None, False
    if new == total and not hides_past:
        return None, True
    query_S1 = torch.arange(total - new, total, device=device)[:, None]
    key_T = torch.arange(total, device=device)
    mask_ST = key_T <= query_S1
    if window is not None:
        mask_ST &= key_T > query_S1 - window
    return mask_ST, False


def make_positions(
    config: DecoderConfig,
    x_BSD: Tensor,
    *,
    start: int,
    total: int,
    window: int | None,
    span: Span | None = None,
) -> Positions:
    """Make the :class:`Positions` of a pass over the residual stream ``x``.

    Args:
        config: the decoder's options.
        x_BSD: gives the number of new positions, the dtype and the device.
        start: index of the first new position in its sequence.
        total: number of positions including the new ones.
        window: number of positions that each sees; None = all.
        span: where a cache stores the new positions.
    """
    length = x_BSD.size(1)
    device = x_BSD.device
    # Rotations of a float16 model are computed in float32: an angle needs more bits than float16
    # has.
    dtype = torch.promote_types(x_BSD.dtype, torch.float32)
    cos_SP, sin_SP = rotary_angles(
        start,
        length,
        config.rotary_features,
        config.rotary_base,
        scaling=config.rotary_scaling,
        factors=config.rotary_factors,
        dtype=dtype,
        device=device,
    )
    mask_ST, is_causal = visibility(length, total, window, causal=config.causal, device=device)
    if config.null_key_value and is_causal:
        mask_ST = torch.ones(length, length, dtype=torch.bool, device=device).tril()
        is_causal = False
    if config.null_key_value and mask_ST is not None:
        mask_ST = F.pad(mask_ST, (1, 0), value=True)
    return Positions(cos_SP, sin_SP, mask_ST, is_causal, span)


def split_heads(x_BSE: Tensor, heads: int) -> Tensor:
    """Return ``[B, S, H C]`` as ``[B, H, S, C]``."""
    return x_BSE.view(*x_BSE.shape[:-1], heads, -1).transpose(1, 2)


class Biases(nn.Module):
    """Float biases of queries, keys and values, zero at initialisation.

    Args:
        features: number of features by the name of the linear.
    """

    def __init__(self, features: Mapping[str, int]) -> None:
        super().__init__()
        for name, size in features.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(size)))

    def forward(self, name: str, x_BSE: Tensor) -> Tensor:
        """Add the bias of the linear ``name`` to its output, in the dtype of the output."""
        return x_BSE + self.get_parameter(name).to(x_BSE.dtype)


class Attention(nn.Module):
    """Attention over earlier positions; over all positions if the config is not causal."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.key_heads = config.key_heads
        self.head_dim = config.key_features
        query_features = self.heads * self.head_dim
        key_features = self.key_heads * self.head_dim
        self.norm = make_norm(config, config.width, gain=True)
        self.query = make_linear(config, config.width, query_features)
        self.key = make_linear(config, config.width, key_features)
        self.value = make_linear(config, config.width, key_features)
        self.query_norm = make_head_norm(config)
        self.key_norm = make_head_norm(config)
        self.output_norm = make_sub_norm(config, query_features)
        self.output = make_linear(config, query_features, config.width)
        sizes = {"query": query_features, "key": key_features, "value": key_features}
        self.biases = Biases(sizes) if config.query_key_value_bias else None

    def forward(
        self, x_BSD: Tensor, positions: Positions, cache: LayerCache | None = None
    ) -> Tensor:
        """Return the update that the residual stream ``x_BSD`` gets."""
        kernels = None
        if self.biases is None:
            norms = (self.norm, self.query_norm, self.key_norm, self.output_norm)
            every_linear = (self.query, self.key, self.value, self.output)
            kernels = kernels_for(x_BSD, norms, every_linear)
        if kernels is not None:
            return self._by_kernels(kernels, x_BSD, positions, cache)

        normed_BSD = self.norm(x_BSD)
        linears = (self.query, self.key, self.value)
        query_BSE, key_BSE, value_BSE = multiply_all(normed_BSD, linears)
        if self.biases is not None:
            query_BSE = self.biases("query", query_BSE)
            key_BSE = self.biases("key", key_BSE)
            value_BSE = self.biases("value", value_BSE)
        query_BHSC = split_heads(query_BSE, self.heads)
        key_BGTC = split_heads(key_BSE, self.key_heads)
        value_BGTC = split_heads(value_BSE, self.key_heads)
        query_BHSC = rotate(self.query_norm(query_BHSC), positions.cos, positions.sin)
        key_BGTC = rotate(self.key_norm(key_BGTC), positions.cos, positions.sin)

        seen_BHSC = self._attend(query_BHSC, key_BGTC, value_BGTC, positions, cache)
        update_BSD: Tensor = self.output(self.output_norm(seen_BHSC.transpose(1, 2).flatten(2)))
        return update_BSD

    def _by_kernels(
        self, kernels: Kernels, x_BSD: Tensor, positions: Positions, cache: LayerCache | None
    ) -> Tensor:
        """Compute the same by the kernels of a backend.

        They attend over whole causal sequences; with a cache or a mask torch does.
        """
        length = x_BSD.size(1)
        angles = positions.cos, positions.sin
        products = native_block.normalized_products(
            kernels, x_BSD.flatten(0, 1), self.norm, (self.query, self.key, self.value)
        )
        if cache is None and positions.is_causal and length <= _LONGEST:
            seen = native_block.attention(
                kernels,
                products,
                (self.query_norm, self.key_norm),
                (self.heads, self.key_heads, length),
                angles,
            )
        else:
            queries, keys, values = products
            key_sizes = self.key_heads, length
            seen = self._attend(
                native_block.turned_heads(
                    kernels, queries, self.query_norm, (self.heads, length), angles
                ),
                native_block.turned_heads(kernels, keys, self.key_norm, key_sizes, angles),
                native_block.turned_heads(kernels, values, _NO_NORM, key_sizes, None),
                positions,
                cache,
            )
        update_MD = native_block.normalized_product(kernels, seen, self.output_norm, self.output)
        return update_MD.view_as(x_BSD)

    def _attend(
        self,
        query_BHSC: Tensor,
        key_BGTC: Tensor,
        value_BGTC: Tensor,
        positions: Positions,
        cache: LayerCache | None,
    ) -> Tensor:
        """Attend over new positions and those in the cache, by torch's operations."""
        if cache is not None and positions.span is not None:
            key_BGTC, value_BGTC = cache.extend(key_BGTC, value_BGTC, positions.span)
        return attend(
            query_BHSC, key_BGTC, value_BGTC, mask=positions.mask, is_causal=positions.is_causal
        )

    def output_projections(self) -> list[nn.Module]:
        """Return the linears that write to the residual stream."""
        return [self.output]
