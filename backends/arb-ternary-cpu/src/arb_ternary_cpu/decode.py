"""Tokens of a plain decoder in one native call.

``decode_step(decoder)`` takes what :mod:`arb_ternary_text.models.decode_plan` describes and returns
what runs a step of it; None where it does not serve that decoder. ``decode_rows(decoder)`` returns
what runs any number of tokens of any sequences. Weights are read where they lie, once a step:
nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import is_
from typing import Any, Final

import torch
from torch import Tensor, get_num_threads

from arb_ternary.backends.arguments import check_readable
from arb_ternary.backends.protocol import WeightShape
from arb_ternary_cpu import _native
from arb_ternary_cpu.arguments import (
    ACTIVATIONS,
    DTYPES,
    check_exponent,
    check_packed,
    check_shape,
    float_dtype,
)

#: The dtypes of the residual stream, and of keys and values that are kept as floats, with their
#: native indices.
_STREAM_DTYPES: Final = {torch.float32: 0, torch.bfloat16: 1}
_KEPT_INT8: Final = 2


def decode_step(isa: int, decoder: Any) -> DecodeStep | None:
    """Return the runner of a plan of :mod:`arb_ternary_text.models.decode_plan`.

    None: the products of a layer that share an input differ in their groups, or a size or a dtype
    is not served.
    """
    if decoder.dtype not in _STREAM_DTYPES or decoder.features % 2 or not decoder.layers:
        return None
    for layer in decoder.layers:
        together = ((layer.query, layer.key, layer.value), (layer.gate or layer.up, layer.up))
        if any(len({one.shape.group_size for one in sharing}) > 1 for sharing in together):
            return None
    return DecodeStep(isa, decoder)


def decode_rows(isa: int, decoder: Any) -> Callable[..., Tensor | None] | None:
    """Return :meth:`DecodeStep.rows` of ``decoder``; None as for :func:`decode_step`."""
    step = decode_step(isa, decoder)
    return None if step is None else step.rows


class DecodeStep:
    """Runs the steps of one decoder, whose tensors it keeps."""

    def __init__(self, isa: int, decoder: Any) -> None:
        self._isa = isa
        self._decoder = decoder
        self._dtype = float_dtype(decoder.dtype, "dtype")
        self._kept: list[Tensor] = []
        self._cached: tuple[Tensor, ...] = ()
        self._addresses = torch.empty(0, dtype=torch.int64)
        self._capacity = 0
        self._kept_as = 0
        self._outputs = decoder.width if decoder.head is None else decoder.vocabulary
        self._plan = self._native_plan(decoder)

    def __call__(
        self, ids_B: Tensor, cache: Sequence[Tensor], slot: int, past: int, position: float
    ) -> Tensor | None:
        """Logits ``[B, V]`` of the tokens that follow ``ids_B``; without a head in the plan, normed
        rows ``[B, D]``.

        Args:
            ids_B: int64.
            cache: keys and values of each layer in turn, ``[B, G, capacity, C]``, in float32 or
                bfloat16; or, rounded to int8 by ``quantize_rows``, with the scales of the keys and
                of the values, float32 ``[B, G, capacity]``, behind those of each layer. The new
                position is written to them, in the first case from what the products give, and in
                the second rounded once, from float32; attention sees what is kept.
            slot: where in the capacity.
            past: positions before ``slot`` that the new one sees.
            position: what turns queries and keys, in the units of the plan's ``speeds``.

        None: more sequences than a step takes, a cache that is not contiguous or of other dtypes,
        an id outside the vocabulary, or exponents that spread too far; the cache holds nothing new
        then.
        """
        batch = ids_B.size(0)
        if not 0 < batch <= _native.most_sequences:
            return None
        if (
            len(cache) != len(self._cached) or not all(map(is_, cache, self._cached))
        ) and not self._bind(cache, batch):
            return None
        if not 0 <= past <= slot < self._capacity or cache[0].size(0) != batch:
            return None
        ids = check_readable(ids_B, "ids", torch.int64, (batch,))
        out = torch.empty((batch, self._outputs), dtype=self._decoder.dtype)
        done = self._plan.step(
            self._isa,
            get_num_threads(),
            batch,
            ids.data_ptr(),
            position,
            self._addresses.data_ptr(),
            self._kept_as,
            self._capacity,
            slot,
            past,
            out.data_ptr(),
            self._dtype,
        )
        return out if done else None

    def rows(
        self,
        ids_R: Tensor,
        cache: Sequence[Tensor],
        tables_ST: Tensor,
        sequence_R: Tensor,
        slot_R: Tensor,
        past_R: Tensor,
        position_R: Tensor,
        wanted_W: Tensor,
    ) -> Tensor | None:
        """Logits ``[W, V]``, or normed rows ``[W, D]`` without a head in the plan, of some tokens.

        What a token gives depends on its id, its position and what it sees, to the last bit: on no
        other token of the call, nor on how positions were divided among calls.

        Args:
            ids_R: tokens of any sequences, int64.
            cache: keys and values of each layer in blocks of positions, ``[blocks, G, size, C]``,
                as those of :meth:`__call__` in every other respect.
            tables_ST: the blocks of each sequence, int64: its slot ``t`` is the place ``t % size``
                of block ``tables_ST[s, t // size]``.
            sequence_R: the row of ``tables_ST`` of each token, int64.
            slot_R: where its key and value go, int64. No two tokens have the same place.
            past_R: slots before it that it sees, int64, also those that this call writes.
            position_R: what turns its query and key, in the units of the plan's ``speeds``,
                float64.
            wanted_W: the tokens of which results are returned, int64.

        None: a cache of another form, an id, a slot or a block that does not exist, or exponents
        that spread too far; other slots hold what they held.
        """
        held = len(cache) == len(self._cached) and all(map(is_, cache, self._cached))
        count = ids_R.numel()
        if count == 0 or not (held or self._bind(cache, cache[0].size(0))):
            return None
        tables = check_readable(tables_ST, "tables", torch.int64, tuple(tables_ST.shape))
        sequences, width = tables.shape
        rows = [
            check_readable(tensor, name, torch.int64, (count,))
            for name, tensor in (
                ("ids", ids_R),
                ("sequence", sequence_R),
                ("slot", slot_R),
                ("past", past_R),
            )
        ]
        positions = check_readable(position_R, "position", torch.float64, (count,))
        wanted = check_readable(wanted_W, "wanted", torch.int64, (wanted_W.numel(),))
        out = torch.empty((wanted.numel(), self._outputs), dtype=self._decoder.dtype)
        ids, sequence, slot, past = (tensor.data_ptr() for tensor in rows)
        done = self._plan.rows(
            self._isa,
            get_num_threads(),
            (
                count,
                ids,
                sequence,
                slot,
                past,
                positions.data_ptr(),
                wanted.numel(),
                wanted.data_ptr(),
            ),
            (
                self._addresses.data_ptr(),
                cache[0].size(0),
                self._capacity,
                tables.data_ptr(),
                sequences,
                width,
            ),
            self._kept_as,
            out.data_ptr(),
            self._dtype,
        )
        return out if done else None

    def _bind(self, cache: Sequence[Tensor], batch: int) -> bool:
        decoder = self._decoder
        layers = len(self._decoder.layers)
        if len(cache) not in (2 * layers, 4 * layers):
            return False
        rounded = len(cache) == 4 * layers
        slots = (batch, decoder.key_heads, cache[0].size(2))
        rows = (*slots, decoder.features)
        scales = slots
        if rounded:
            forms = [
                (torch.int8, rows),
                (torch.int8, rows),
                (torch.float32, scales),
                (torch.float32, scales),
            ]
        else:
            kept = cache[0].dtype
            if kept not in _STREAM_DTYPES:
                return False
            forms = [(kept, rows)] * 2
        for tensor, (dtype, size) in zip(cache, forms * layers, strict=True):
            if tensor.dtype is not dtype or tensor.shape != size or not tensor.is_contiguous():
                return False
            if not tensor.is_cpu or tensor.is_neg():
                return False
        self._cached = tuple(cache)
        self._capacity = slots[2]
        self._kept_as = _KEPT_INT8 if rounded else _STREAM_DTYPES[cache[0].dtype]
        self._addresses = torch.tensor([tensor.data_ptr() for tensor in cache], dtype=torch.int64)
        return True

    def _native_plan(self, decoder: Any) -> _native.DecodePlan:
        plan = _native.DecodePlan(
            decoder.width,
            decoder.heads,
            decoder.key_heads,
            decoder.features,
            decoder.hidden,
            decoder.vocabulary,
            ACTIVATIONS[decoder.activation],
            list(decoder.speeds),
        )
        if isinstance(decoder.embedding, Tensor):
            table = self._keep(decoder.embedding, "embedding", (decoder.vocabulary, decoder.width))
            plan.set_embedding(table.data_ptr(), DTYPES[table.dtype])
        else:
            plan.set_ternary_embedding(self._projection(decoder.embedding))
        width = decoder.width
        hidden = decoder.hidden
        attended = decoder.heads * decoder.features
        for given in decoder.layers:
            layer = _native.DecodeLayer()
            layer.attention_norm = self._norm(given.attention_norm, width)
            layer.query_norm = self._norm(given.query_norm, decoder.features)
            layer.key_norm = self._norm(given.key_norm, decoder.features)
            layer.output_norm = self._norm(given.output_norm, attended)
            layer.feed_norm = self._norm(given.feed_norm, width)
            layer.hidden_norm = self._norm(given.hidden_norm, hidden)
            keyed = decoder.key_heads * decoder.features
            layer.query = self._projection(given.query, attended, width)
            layer.key = self._projection(given.key, keyed, width)
            layer.value = self._projection(given.value, keyed, width)
            layer.output = self._projection(given.output, width, attended)
            layer.gate = (
                _native.Projection()
                if given.gate is None
                else self._projection(given.gate, hidden, width)
            )
            layer.up = self._projection(given.up, hidden, width)
            layer.down = self._projection(given.down, width, hidden)
            layer.residual_scale = given.residual_scale
            plan.add_layer(layer)
        plan.final_norm = self._norm(decoder.final_norm, width)
        if decoder.head is not None:
            plan.head = self._projection(decoder.head, decoder.vocabulary, width)
            plan.logit_scale = decoder.logit_scale
        return plan

    def _keep(self, tensor: Tensor, name: str, size: tuple[int, ...]) -> Tensor:
        """A tensor whose address may be used as long as this lives."""
        float_dtype(tensor.dtype, name)
        kept = check_readable(tensor, name, tensor.dtype, size)
        if kept is not tensor:
            raise ValueError(f"{name} must be contiguous: a copy would not follow what it learns")
        self._kept.append(kept)
        return kept

    def _weight(self, given: Any) -> tuple[int, int]:
        shape: WeightShape = given.shape
        check_shape(shape)
        packed = check_packed(given.packed, shape)
        exponent = check_exponent(given.exponent, shape)
        if (
            packed is not given.packed
            or exponent is not given.exponent
            or not shape.out_features * shape.in_features
        ):
            raise ValueError("a weight must be contiguous and not empty")
        self._kept += (packed, exponent)
        return packed.data_ptr(), exponent.data_ptr()

    def _projection(
        self, given: Any, outputs: int | None = None, inputs: int | None = None
    ) -> _native.Projection:
        shape: WeightShape = given.shape
        if outputs is not None and (shape.out_features, shape.in_features) != (outputs, inputs):
            raise ValueError(f"a weight must be [{outputs}, {inputs}], got {shape}")
        factor = 0
        by_rows = False
        if given.factor is not None:
            by_rows = given.factor.numel() > 1
            kept = check_readable(
                given.factor, "factor", torch.float32, (shape.out_features if by_rows else 1,)
            )
            self._kept.append(kept)
            factor = kept.data_ptr()
        return _native.Projection(*self._weight(given), *_sizes(shape), factor, by_rows)

    def _norm(self, given: Any, features: int) -> _native.Norm:
        if given is None:
            return _native.Norm()
        if given.row is not None:
            shape: WeightShape = given.row.shape
            if (shape.out_features, shape.in_features) != (1, features):
                raise ValueError(f"a gain must be [1, {features}], got {shape}")
            return _native.Norm(given.eps, *self._weight(given.row), *_sizes(shape)[1:])
        if given.gain is None:
            return _native.Norm(given.eps, 0, 0)
        gain = self._keep(given.gain, "gain", (features,))
        return _native.Norm(given.eps, gain.data_ptr(), DTYPES[gain.dtype])


def _sizes(shape: WeightShape) -> tuple[int, int, int, int]:
    return shape.out_features, shape.in_features, shape.groups, shape.group_size


def kernels(isa: int) -> dict[str, Callable[..., Any]]:
    """The kernels of this module for the instruction set with this index."""
    return {
        "text.decode_rows": partial(decode_rows, isa),
        "text.decode_step": partial(decode_step, isa),
    }
