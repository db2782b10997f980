"""Keys and values of the tokens seen so far, for decoding and for training on streamed text.

Shapes: ``B`` sequences, ``H`` key heads, ``S`` new positions, ``T`` positions that the new ones may see (their own
included), ``C`` features of a head.

A forward pass first calls :meth:`KeyValueCache.reserve`, then each layer's :meth:`LayerCache.extend` with the span
that it returned, then :meth:`KeyValueCache.advance`. ``extend`` writes to the slots of the span, whatever was counted
since, so that running a layer again before the next ``reserve`` (activation checkpointing does, in the backward)
gives the same result.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from arb_ternary.errors import UsageProblem

__all__ = ["KeyValueCache", "LayerCache", "Span"]

#: Slots that the first allocation has at least; a full cache doubles.
FIRST_CAPACITY = 64


class Span(NamedTuple):
    """Where a pass writes (from ``slot`` on), and how many positions before that it may see (``past``)."""

    slot: int
    past: int


class LayerCache:
    """Keys and values of one layer, in slots along the third dimension."""

    def __init__(self) -> None:
        self.keys_BHTC: Tensor | None = None
        self.values_BHTC: Tensor | None = None
        self.capacity = 0

    def extend(self, keys_BHSC: Tensor, values_BHSC: Tensor, span: Span) -> tuple[Tensor, Tensor]:
        """Store new keys and values; return those that the new positions may see, ``[B, H, T, C]``.

        What is stored is detached: no gradient reaches an earlier pass.
        """
        stored_keys, stored_values = self.room_for(keys_BHSC, values_BHSC, span)
        return _written(stored_keys, keys_BHSC, span), _written(stored_values, values_BHSC, span)

    def room_for(self, keys_BHSC: Tensor, values_BHSC: Tensor, span: Span) -> tuple[Tensor, Tensor]:
        """All slots of keys and values, ``[B, H, capacity, C]``, enlarged where the new ones would not fit.

        Of the new ones only dtype, device and ``B, H, C`` count.
        """
        keys, values = self.keys_BHTC, self.values_BHTC
        if keys is None or values is None or keys.size(2) < self.capacity:
            self.keys_BHTC = keys = self._grown(keys, keys_BHSC, span.slot)
            self.values_BHTC = values = self._grown(values, values_BHSC, span.slot)
        return keys, values

    def compact(self, span: Span) -> None:
        """Move the ``past`` positions before ``slot`` to the front."""
        for stored in (self.keys_BHTC, self.values_BHTC):
            if stored is not None:
                stored[:, :, : span.past] = stored[:, :, span.slot - span.past : span.slot].clone()

    def latest(self, span: Span) -> list[Tensor]:
        """Copies of the keys and the values of the ``past`` positions before ``slot``."""
        return [
            stored[:, :, span.slot - span.past : span.slot].clone()
            for stored in (self.keys_BHTC, self.values_BHTC)
            if stored is not None
        ]

    def restore(self, latest: list[Tensor]) -> None:
        """Continue from what :meth:`latest` returned."""
        self.keys_BHTC, self.values_BHTC = (stored.clone() for stored in latest)
        self.capacity = self.keys_BHTC.size(2)

    def _grown(self, stored: Tensor | None, new: Tensor, slot: int) -> Tensor:
        batch, heads, _, features = new.shape
        grown = new.new_zeros(batch, heads, self.capacity, features)
        if stored is not None:
            grown[:, :, :slot] = stored[:, :, :slot]
        return grown


def _written(stored: Tensor, new: Tensor, span: Span) -> Tensor:
    stop = span.slot + new.size(2)
    stored[:, :, span.slot : stop] = new.detach()
    if torch.is_grad_enabled():
        # A copy: the backward needs it unchanged while the next pass writes to the slots.
        return torch.cat((stored[:, :, span.slot - span.past : span.slot], new), dim=2)
    return stored[:, :, span.slot - span.past : stop]


class KeyValueCache:
    """The caches of all layers, and how many tokens they have seen.

    Args:
        layers: number of layers.
        batch_size: sequences, all of the same length.
        window: positions that a position sees, itself included; older ones are dropped. None = all.
        limit: most tokens the cache may hold; None = no bound (give a window, so that memory is bounded).
    """

    def __init__(self, layers: int, batch_size: int, *, window: int | None, limit: int | None) -> None:
        self.batch_size = batch_size
        self.window = window
        self.limit = limit
        self.length = 0
        self.layers = [LayerCache() for _ in range(layers)]
        self._slot = 0
        self._capacity = 0

    def reserve(self, batch_size: int, count: int) -> Span:
        """Make room for ``count`` tokens.

        Raises:
            UsageProblem: another batch size than the cache was made for, or more tokens than it may hold.
        """
        if batch_size != self.batch_size:
            raise UsageProblem(
                f"cache: it was made for a batch of {self.batch_size} sequences and is used with {batch_size}",
                "Make a new one: model.new_cache(batch_size).",
            )
        if self.limit is not None and self.length + count > self.limit:
            raise UsageProblem(
                f"cache: {self.length} tokens seen and {count} more exceed the context of {self.limit}",
                "Start a new cache with the latest tokens, or train the model with a larger max_length.",
            )
        span = self._span()
        if self.window is not None and span.slot + count > self._capacity:
            for layer in self.layers:
                layer.compact(span)
            self._slot = span.past
            span = self._span()
        if span.slot + count > self._capacity:
            self._capacity = self._enlarged(span.slot + count)
            for layer in self.layers:
                layer.capacity = self._capacity
        return span

    def advance(self, count: int) -> None:
        """Count ``count`` tokens as seen."""
        self.length += count
        self._slot += count

    def state_dict(self) -> dict[str, Any]:
        """What the coming positions may still see: nested lists and tensors, bounded by the window."""
        layers = [layer.latest(self._span()) for layer in self.layers] if self.length else []
        return {"length": self.length, "layers": layers}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict` of a cache of the same model and batch size."""
        self.length = int(state["length"])
        self.layers = [LayerCache() for _ in self.layers]
        self._slot = self._capacity = self._span().past
        if self.length:
            for layer, latest in zip(self.layers, state["layers"], strict=True):
                layer.restore(latest)

    def _span(self) -> Span:
        past = self.length if self.window is None else min(self.length, self.window - 1)
        return Span(self._slot, past)

    def _enlarged(self, needed: int) -> int:
        if self.window is not None:
            # Twice the window, so that compacting costs one copied position a decoded token.
            return max(needed, 2 * self.window)
        doubled = max(needed, 2 * self._capacity, FIRST_CAPACITY)
        return doubled if self.limit is None else min(doubled, self.limit)
