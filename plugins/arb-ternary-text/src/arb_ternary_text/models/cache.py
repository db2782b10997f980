"""Keys and values of the tokens seen so far, for decoding and for training on streamed text.

A cache keeps them as the model computes them (``float``), in at most 16 bits
(:class:`Bfloat16LayerCache`), or rounded to ``int8`` (:class:`Int8LayerCache`).

A forward pass first calls :meth:`KeyValueCache.reserve`, then each layer's
:meth:`LayerCache.extend` with the span that it returned, then :meth:`KeyValueCache.advance`.
``extend`` writes to the slots of the span, whatever was counted since. So running a layer again
before the next ``reserve``, as activation checkpointing does in backward, gives the same result.

Shapes: ``B`` sequences, ``H`` key heads, ``S`` new positions, ``T`` positions that the new ones may
see (their own included), ``C`` features of a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from arb_ternary.backends.reference import quantize_rows
from arb_ternary.errors import UsageProblem

#: Formats of keys and values.
CacheNumbers = Literal["float", "bfloat16", "int8"]

#: Smallest number of slots of the first allocation; a full cache doubles.
FIRST_CAPACITY = 64


class Span(NamedTuple):
    """The slots of a pass.

    Attributes:
        slot: the first slot that it writes.
        past: number of slots before it that it may see.
    """

    slot: int
    past: int


class LayerCache:
    """Keys and values of one layer as the model computes them, in slots along the third dimension.

    Attributes:
        stored: nothing before the first pass, then keys and values, ``[B, H, capacity, C]``. The
            tensors of a subclass have slots along the third dimension, too.
        capacity: number of slots needed from the next pass on.
    """

    def __init__(self) -> None:
        self.stored: list[Tensor] = []
        self.capacity = 0

    def extend(self, keys_BHSC: Tensor, values_BHSC: Tensor, span: Span) -> tuple[Tensor, Tensor]:
        """Store new keys and values; return those that the new positions may see, ``[B, H, T, C]``.

        Stored tensors are detached: no gradient reaches an earlier pass.
        """
        kept = self._kept(keys_BHSC, values_BHSC)
        places = self.room_for(keys_BHSC, values_BHSC, span)
        seen = [_written(stored, new, span) for stored, new in zip(places, kept, strict=True)]
        return self._read(seen, keys_BHSC.dtype)

    def room_for(self, keys_BHSC: Tensor, values_BHSC: Tensor, span: Span) -> list[Tensor]:
        """Return all slots of the ``stored`` tensors, enlarged if the new ones would not fit.

        Of the new keys and values only dtype, device and ``B, H, C`` matter.
        """
        if not self.stored or self.stored[0].size(2) < self.capacity:
            like = self._kept(keys_BHSC[:, :, :0], values_BHSC[:, :, :0])
            grown = [new.new_zeros(*new.shape[:2], self.capacity, *new.shape[3:]) for new in like]
            # nothing is stored before the first pass
            for stored, place in zip(self.stored, grown, strict=False):
                place[:, :, : span.slot] = stored[:, :, : span.slot]
            self.stored = grown
        return self.stored

    def compact(self, span: Span) -> None:
        """Move the ``past`` positions before ``slot`` to the front."""
        for stored in self.stored:
            stored[:, :, : span.past] = stored[:, :, span.slot - span.past : span.slot].clone()

    def latest(self, span: Span) -> list[Tensor]:
        """Return copies of the stored tensors of the ``past`` positions before ``slot``."""
        return [stored[:, :, span.slot - span.past : span.slot].clone() for stored in self.stored]

    def restore(self, latest: list[Tensor]) -> None:
        """Continue from tensors that :meth:`latest` returned."""
        self.stored = [stored.clone() for stored in latest]
        self.capacity = self.stored[0].size(2)

    def _kept(self, keys_BHSC: Tensor, values_BHSC: Tensor) -> list[Tensor]:
        """Return the tensors to store for these keys and values."""
        return [keys_BHSC, values_BHSC]

    def _read(self, stored: list[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return keys and values for attention in ``dtype`` from stored tensors."""
        keys, values = stored
        return keys, values


class Bfloat16LayerCache(LayerCache):
    """Keys and values of one layer in at most 16 bits: half the memory of float32.

    Those of a float32 or float64 model are rounded to bfloat16, to the nearest and ties to even.
    Attention sees the rounded numbers in its own dtype, of new positions as of old ones. Those of a
    bfloat16 or float16 model are kept as they are.
    """

    def _kept(self, keys_BHSC: Tensor, values_BHSC: Tensor) -> list[Tensor]:
        return [_in_16_bits(keys_BHSC), _in_16_bits(values_BHSC)]

    def _read(self, stored: list[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        keys, values = stored
        return keys.to(dtype), values.to(dtype)


def _in_16_bits(x: Tensor) -> Tensor:
    if x.dtype.itemsize <= torch.bfloat16.itemsize:
        return x
    return x.to(torch.bfloat16)


class Int8LayerCache(LayerCache):
    """Keys and values of one layer rounded to int8: ``C`` bytes and a scale per position and head.

    A key (after its norm and rotation) or a value is a row of ``C`` features. ``quantize_rows`` of
    :mod:`arb_ternary.backends.reference` rounds it in float32: ``scale = max|x| / 127``, ``code =
    round_half_even(x / scale)``. The scale of zeros is 0, and that of a row that is not finite is
    not finite either. Attention sees ``code * scale``, computed in float32 and then rounded to its
    dtype, of new positions as of old ones. So a position is the same to all positions that see it,
    however many are read at once. Scales are float32: float16 would save 2 of ``C + 4`` bytes and
    limit the size of rows.

    ``stored``: codes of keys and of values, int8 ``[B, H, capacity, C]``, then their scales,
    float32 ``[B, H, capacity]``.
    """

    def _kept(self, keys_BHSC: Tensor, values_BHSC: Tensor) -> list[Tensor]:
        if torch.is_grad_enabled():
            raise UsageProblem(
                "cache: keys and values rounded to int8 have no gradient",
                "Run the model under torch.no_grad().",
            )
        keys, key_scales = _rounded(keys_BHSC)
        values, value_scales = _rounded(values_BHSC)
        return [keys, values, key_scales, value_scales]

    def _read(self, stored: list[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        keys, values, key_scales, value_scales = stored
        keys = (keys * key_scales.unsqueeze(-1)).to(dtype)
        values = (values * value_scales.unsqueeze(-1)).to(dtype)
        return keys, values


def _rounded(x_BHSC: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes ``[B, H, S, C]`` and scales ``[B, H, S]``."""
    codes, scales = quantize_rows(x_BHSC.flatten(0, 2))
    return codes.view(x_BHSC.shape), scales.view(x_BHSC.shape[:3])


def _written(stored: Tensor, new: Tensor, span: Span) -> Tensor:
    """Write new positions to their slots; return all positions that they may see."""
    stop = span.slot + new.size(2)
    stored[:, :, span.slot : stop] = new.detach()
    if torch.is_grad_enabled():
        # A copy: backward needs it unchanged while the next pass writes to the slots.
        return torch.cat((stored[:, :, span.slot - span.past : span.slot], new), dim=2)
    return stored[:, :, span.slot - span.past : stop]


_LAYERS: Final[dict[str, type[LayerCache]]] = {
    "float": LayerCache,
    "bfloat16": Bfloat16LayerCache,
    "int8": Int8LayerCache,
}


class KeyValueCache:
    """The caches of all layers, and how many tokens they have seen.

    Args:
        layers: number of layers.
        batch_size: number of sequences, all of the same length.
        window: number of positions that a position sees, itself included; older ones are dropped.
            None = all.
        limit: largest number of tokens; None = no bound (give a window, so that memory is bounded).
        numbers: format of keys and values; ``int8`` is for passes without gradients.

    Raises:
        UsageProblem: there is no such format.
    """

    def __init__(
        self,
        layers: int,
        batch_size: int,
        *,
        window: int | None,
        limit: int | None,
        numbers: CacheNumbers = "float",
    ) -> None:
        if numbers not in _LAYERS:
            raise UsageProblem(
                f"cache: {numbers!r} is not one of {', '.join(get_args(CacheNumbers))}"
            )
        self.batch_size = batch_size
        self.window = window
        self.limit = limit
        self.numbers = numbers
        self.length = 0
        self.layers = [_LAYERS[numbers]() for _ in range(layers)]
        self._slot = 0
        self._capacity = 0

    def reserve(self, batch_size: int, count: int) -> Span:
        """Make room for ``count`` tokens.

        Raises:
            UsageProblem: the batch size is not the cache's, or there are more tokens than it may
                hold.
        """
        if batch_size != self.batch_size:
            raise UsageProblem(
                f"cache: it was made for a batch of {self.batch_size} sequences and is used with "
                f"{batch_size}",
                "Make a new one: model.new_cache(batch_size).",
            )
        if self.limit is not None and self.length + count > self.limit:
            raise UsageProblem(
                f"cache: {self.length} tokens seen and {count} more exceed the context of "
                f"{self.limit}",
                "Start a new cache with the latest tokens, or train the model with a larger "
                "max_length.",
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

    def rewind(self, length: int) -> None:
        """Forget all but the first ``length`` tokens of a cache without a window."""
        assert self.window is None
        assert length <= self.length
        self.length = length
        self._slot = length

    def bytes_per_token(self) -> int:
        """Return the bytes that all layers keep per token of one sequence; 0 before a pass."""
        return sum(stored[:1, :, :1].nbytes for layer in self.layers for stored in layer.stored)

    def state_dict(self) -> dict[str, Any]:
        """Return what later positions may still see, as nested lists of tensors."""
        layers = [layer.latest(self._span()) for layer in self.layers] if self.length else []
        return {"length": self.length, "layers": layers}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of a cache of the same model, batch size and format."""
        self.length = int(state["length"])
        self.layers = [_LAYERS[self.numbers]() for _ in self.layers]
        self._slot = self._span().past
        self._capacity = self._slot
        if self.length:
            for layer, latest in zip(self.layers, state["layers"], strict=True):
                layer.restore(latest)

    def _span(self) -> Span:
        past = self.length if self.window is None else min(self.length, self.window - 1)
        return Span(self._slot, past)

    def _enlarged(self, needed: int) -> int:
        if self.window is not None:
            # Twice the window, so that compacting copies one position per decoded token.
            return max(needed, 2 * self.window)
        doubled = max(needed, 2 * self._capacity, FIRST_CAPACITY)
        return doubled if self.limit is None else min(doubled, self.limit)
