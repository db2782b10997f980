"""Votes: gradients turned into integers, integers into flips.

Kernels as functions of tensors, with the signatures of :mod:`arb_ternary.backends.reference`; what
they take is checked here, what they do is native.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import torch
from torch import Tensor, get_num_threads

from arb_ternary.backends.arguments import check_mutable, check_readable, vote_dtype
from arb_ternary.backends.protocol import VOTE_BITS, WeightShape
from arb_ternary.backends.vote_state import VoteState
from arb_ternary_cpu import _native
from arb_ternary_cpu.arguments import WORD, check_exponent, check_packed, check_shape, packed_shape

#: Types that the kernels read as they are; other floating-point tensors are converted to float32
#: first.
_ELEMENTS: Final = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _written(tensor: Tensor, name: str, dtype: torch.dtype, size: tuple[int, ...]) -> int:
    """The address of a tensor that a kernel changes in place."""
    check_mutable(tensor, name, dtype, size)
    return tensor.data_ptr()


def kernels(isa: int) -> dict[str, Callable[..., object]]:
    """The kernels of this module for the instruction set with this index."""
    chosen: dict[str, Callable[..., object]] = {
        "cast_votes": _cast_votes,
        "cast_scaled_votes": _cast_scaled_votes,
        "embedding_votes": _embedding_votes,
        "embedding_scaled_votes": _embedding_scaled_votes,
        "text.cast_vectors": _cast_vectors,
        "apply_votes": _apply_votes,
        "apply_scaled_votes": _apply_scaled_votes,
        "apply_exponent_votes": _apply_exponent_votes,
        "votes.sums_to_quanta": _sums_to_quanta,
        "add_votes": _settle_votes,
    }
    bound: dict[str, Callable[..., object]] = {
        op: partial(kernel, isa) for op, kernel in chosen.items()
    }
    return {
        **bound,
        "pack_votes": _pack_votes,
        "unpack_votes": _unpack_votes,
        "text.vector_values": _vector_values,
    }


# --- storage of accumulators


def _row_bytes(columns: int, bits: int) -> int:
    """Bytes of a row of stored accumulators: whole bytes that hold 8, 4 or 2 bits a column."""
    return -(-columns * bits // 8)


def _stored_size(shape: WeightShape) -> tuple[int, int]:
    return shape.out_features, _row_bytes(shape.in_features, shape.vote_bits)


def _stored(votes: Tensor, shape: WeightShape) -> int:
    return _written(votes, "votes", vote_dtype(shape), _stored_size(shape))


def _pack_votes(votes_NK: Tensor, bits: int = 8) -> Tensor:
    _require(bits in VOTE_BITS, f"bits must be one of {VOTE_BITS}, got {bits}")
    _require(votes_NK.dim() == 2, f"votes must have 2 dimensions, got {votes_NK.dim()}")
    rows, columns = votes_NK.shape
    votes = check_readable(votes_NK, "votes", torch.int8, (rows, columns))
    if bits == 8:
        return votes.clone(memory_format=torch.contiguous_format)
    out = torch.empty(rows, _row_bytes(columns, bits), dtype=torch.uint8)
    _native.pack_votes(votes.data_ptr(), rows, columns, bits, out.data_ptr(), get_num_threads())
    return out


def _unpack_votes(votes: Tensor, shape: WeightShape) -> Tensor:
    check_shape(shape)
    stored = check_readable(votes, "votes", vote_dtype(shape), _stored_size(shape))
    if shape.vote_bits == 8:
        return stored.clone(memory_format=torch.contiguous_format)
    rows = shape.out_features
    columns = shape.in_features
    out = torch.empty(rows, columns, dtype=torch.int8)
    _native.unpack_votes(
        stored.data_ptr(), rows, columns, shape.vote_bits, out.data_ptr(), get_num_threads()
    )
    return out


# --- casting


def _operand(tensor: Tensor, name: str, size: tuple[int, ...]) -> Tensor:
    """A contiguous operand of a type that the kernels read."""
    if tensor.dtype not in _ELEMENTS and tensor.is_floating_point():
        tensor = tensor.to(torch.float32)
    _require(tensor.dtype in _ELEMENTS, f"{name} must be float or int8, got {tensor.dtype}")
    return check_readable(tensor, name, tensor.dtype, size)


def _unit(scale: Tensor | None) -> int:
    if scale is None:
        return 0
    check_mutable(scale, "scale", torch.float32, tuple(scale.shape))
    _require(scale.numel() == 1, f"scale must be one number, got {list(scale.shape)}")
    return scale.data_ptr()


def _weight(scale: Tensor | None, state: VoteState) -> _native.Weight:
    shape = state.shape
    check_shape(shape)
    rows = shape.out_features
    columns = shape.in_features
    _require(check_packed(state.weight, shape) is state.weight, "packed must be contiguous")
    groups = shape.groups if columns else 0
    learned = 0
    if state.exponent_votes is not None:
        learned = _written(state.exponent_votes, "exponent_votes", torch.int8, (rows, groups))
    return _native.Weight(
        rows,
        columns,
        max(shape.group_size, 1),
        shape.vote_bits,
        state.weight.data_ptr(),
        _stored(state.votes, shape),
        learned,
        _written(state.stats, "stats", torch.float32, (1 + rows + columns,)),
        _unit(scale),
    )


def _scaled(grad: Tensor, scale: Tensor | None, state: VoteState) -> tuple[_native.Scaled, Tensor]:
    """Return the kernels' rule of scaled votes, and its factors, which have to live as long."""
    limits = state.check_scaling(scale is not None and grad.dtype == torch.int8)
    magnitudes, vote_scale = state.scaling
    size = (state.sizes[0] + state.sizes[1],)
    shifts = vote_scale.dtype == torch.int32
    factors = check_readable(
        vote_scale, "vote_scale", torch.int32 if shifts else torch.float32, size
    )
    scaled = _native.Scaled(
        _written(magnitudes, "magnitudes", torch.float32, size),
        factors.data_ptr(),
        shifts,
        *limits,
        *(word & WORD for word in state.draw()),
    )
    return scaled, factors


def _cast_linear(
    isa: int,
    weight: _native.Weight,
    scaled: _native.Scaled | None,
    grad_MN: Tensor,
    x_MK: Tensor,
    shape: WeightShape,
) -> None:
    _require(x_MK.dim() == 2, f"x must be [M, K], got {list(x_MK.shape)}")
    tokens = x_MK.shape[0]
    grad = _operand(grad_MN, "grad", (tokens, shape.out_features))
    x = _operand(x_MK, "x", (tokens, shape.in_features))
    if grad.dtype == torch.int8:
        _require(x.dtype == torch.int8, f"an int8 gradient needs int8 activations, got {x.dtype}")
    _native.cast_linear(
        isa,
        get_num_threads(),
        weight,
        scaled,
        _ELEMENTS[grad.dtype],
        grad.data_ptr(),
        _ELEMENTS[x.dtype],
        x.data_ptr(),
        tokens,
    )


def _cast_votes(
    isa: int, grad_MN: Tensor, x_MK: Tensor, scale: Tensor | None, state: VoteState
) -> None:
    _cast_linear(isa, _weight(scale, state), None, grad_MN, x_MK, state.shape)


def _cast_scaled_votes(
    isa: int, grad_MN: Tensor, x_MK: Tensor, scale: Tensor | None, state: VoteState
) -> None:
    scaled, _alive = _scaled(grad_MN, scale, state)
    _cast_linear(isa, _weight(scale, state), scaled, grad_MN, x_MK, state.shape)


def _cast_lookup(
    isa: int,
    weight: _native.Weight,
    scaled: _native.Scaled | None,
    ids_M: Tensor,
    grad_MK: Tensor,
    state: VoteState,
) -> None:
    shape = state.shape
    _require(ids_M.dim() == 1, f"ids must be [M], got {list(ids_M.shape)}")
    tokens = ids_M.shape[0]
    ids = check_readable(ids_M, "ids", torch.int64, (tokens,))
    grad = _operand(grad_MK, "grad", (tokens, shape.in_features))
    size = (shape.out_features, shape.groups if shape.in_features else 0)
    correlated = (0, 0)
    if state.correlation is not None and state.steps is not None:
        correlated = (
            _written(state.correlation, "correlation", torch.int16, size),
            _written(state.steps, "steps", torch.int32, size),
        )
    found = _native.cast_lookup(
        isa,
        get_num_threads(),
        weight,
        scaled,
        *correlated,
        ids.data_ptr(),
        _ELEMENTS[grad.dtype],
        grad.data_ptr(),
        tokens,
    )
    if not found:
        raise IndexError(
            f"ids must be in 0..{shape.out_features - 1}, got {int(ids.min())}..{int(ids.max())}"
        )


def _embedding_votes(
    isa: int, ids_M: Tensor, grad_MK: Tensor, scale: Tensor | None, state: VoteState
) -> None:
    _cast_lookup(isa, _weight(scale, state), None, ids_M, grad_MK, state)


def _embedding_scaled_votes(
    isa: int, ids_M: Tensor, grad_MK: Tensor, scale: Tensor | None, state: VoteState
) -> None:
    scaled, _alive = _scaled(grad_MK, scale, state)
    _cast_lookup(isa, _weight(scale, state), scaled, ids_M, grad_MK, state)


# --- vectors of trits


def _vector_values(states: Sequence[VoteState]) -> list[Tensor]:
    """1 plus the sum of each row, float32 ``[N]``, of weights with one exponent a row."""
    vectors = []
    values = []
    for state in states:
        shape = state.shape
        packed = check_packed(state.weight, shape)
        _require(shape.groups == 1, f"one exponent a row is needed, got {shape.groups}")
        exponent = check_exponent(state.exponent, shape)
        value = torch.empty(shape.out_features)
        size = (shape.out_features, shape.in_features)
        vectors.append((packed.data_ptr(), exponent.data_ptr(), *size, value.data_ptr()))
        values.append(value)
    _native.sum_vectors(vectors)
    return values


def _cast_vectors(isa: int, grads: Sequence[Tensor], states: Sequence[VoteState]) -> None:
    """Cast the votes of vectors from the gradients of their numbers, and count the casts."""
    vectors = []
    alive = []
    for grad_N, state in zip(grads, states, strict=True):
        grad = check_readable(grad_N, "grad", torch.float32, (state.sizes[0],))
        check_mutable(state.control, "control", torch.int64, (4,))
        scaled = None
        factors = None
        if state.vote_scale is not None:
            scaled, factors = _scaled(grad, None, state)
        alive.append((grad, factors))
        weight = _weight(None, state)
        vectors.append((weight, scaled, grad.data_ptr(), state.control.data_ptr()))
    _native.cast_vectors(isa, vectors)


# --- sums of a step


def _sums_of_a_step(tensor: Tensor, name: str) -> tuple[Tensor, bool]:
    """Contiguous integers, and whether they have 32 bits."""
    _require(
        tensor.dtype in (torch.int16, torch.int32),
        f"{name} must be int16 or int32, got {tensor.dtype}",
    )
    return check_readable(
        tensor, name, tensor.dtype, tuple(tensor.shape)
    ), tensor.dtype is torch.int32


def _sums_to_quanta(
    isa: int, sums: Tensor, whole: int, fraction: int, words: tuple[int, int, int], start: int
) -> Tensor:
    """``(sums * (whole + fraction / 2**24) + u) >> 0`` in int32, ``u`` from the hash of ``start``
    and what follows.
    """
    sums, wide = _sums_of_a_step(sums, "sums")
    _require(
        0 <= whole <= 127 and 0 <= fraction < 1 << 24,
        f"a vote is worth 0..127 quanta, got {whole} and {fraction}",
    )
    quanta = torch.empty(sums.shape, dtype=torch.int32)
    if sums.numel():
        seed, step, stream = (word & WORD for word in words)
        operands = sums.data_ptr(), wide, sums.numel(), whole, fraction, seed, step, stream, start
        _native.sums_to_quanta(isa, get_num_threads(), *operands, quanta.data_ptr())
    return quanta


def _settle_votes(isa: int, votes: Tensor, shape: WeightShape, whole: Tensor, low: int) -> None:
    """``votes = clip(votes + whole, low, R)`` in place, for integers ``[N, K]``."""
    check_shape(shape)
    size = (shape.out_features, shape.in_features)
    _require(
        tuple(whole.shape) == size, f"whole votes must be {list(size)}, got {list(whole.shape)}"
    )
    whole, wide = _sums_of_a_step(whole, "whole votes")
    stored = _stored(votes, shape)
    largest = shape.largest_vote
    _require(-128 <= low <= -1, f"votes are clipped at -128..-1 below, got {low}")
    operands = whole.data_ptr(), wide, *size, shape.vote_bits, low, largest
    _native.settle_votes(isa, get_num_threads(), *operands, stored)


# --- flips


def _flip(
    isa: int,
    state: VoteState,
    threshold: int,
    *,
    leak: int = 0,
    decay: int = 0,
    carry: bool = False,
    words: tuple[int, int, int] = (0, 0, 0),
) -> Tensor:
    shape = state.shape
    check_shape(shape)
    _require(
        1 <= threshold <= shape.largest_vote,
        f"threshold must be in 1..{shape.largest_vote} for votes of {shape.vote_bits} bits, got "
        f"{threshold}",
    )
    seed, step, stream = (word & WORD for word in words)
    moved = _native.flip_trits(
        isa,
        get_num_threads(),
        shape.out_features,
        shape.in_features,
        shape.vote_bits,
        _written(
            state.weight, "packed", torch.uint8, packed_shape(shape.out_features, shape.in_features)
        ),
        _stored(state.votes, shape),
        threshold,
        leak,
        decay,
        carry,
        seed,
        step,
        stream,
        state.first_row,
    )
    return torch.tensor(moved, dtype=torch.int64)


def _apply_votes(isa: int, state: VoteState, threshold: int, leak: int) -> Tensor:
    _require(leak >= 0, f"leak must not be negative, got {leak}")
    return _flip(isa, state, threshold, leak=min(leak, 128))


def _apply_scaled_votes(
    isa: int, state: VoteState, threshold: int, decay: int, carry: bool
) -> Tensor:
    _require(0 <= decay <= 65536, f"decay must be in 0..65536, got {decay}")
    return _flip(isa, state, threshold, decay=decay, carry=bool(carry), words=state.draw())


def _apply_exponent_votes(
    isa: int, state: VoteState, threshold: int, band: int, leak: int
) -> Tensor:
    exponent = state.exponent
    exponent_votes = state.learned
    origin = state.origin
    _require(exponent.dim() == 2, f"exponent must be [N, J], got {tuple(exponent.shape)}")
    _require(1 <= threshold <= 127, f"threshold must be in 1..127, got {threshold}")
    _require(band >= 0 and leak >= 0, f"band and leak must not be negative, got {band} and {leak}")
    rows, groups = exponent.shape
    centre = origin.expand(rows, groups)
    _require(
        centre.is_cpu and centre.dtype == torch.int8,
        f"origin must be int8 on the CPU, got {origin.dtype}",
    )
    row_stride, group_stride = centre.stride()
    if group_stride not in (0, 1):
        centre = centre.contiguous()
        row_stride = groups
        group_stride = 1
    moved = _native.flip_exponents(
        isa,
        get_num_threads(),
        _written(exponent, "exponent", torch.int8, (rows, groups)),
        _written(exponent_votes, "exponent_votes", torch.int8, (rows, groups)),
        centre.data_ptr(),
        row_stride,
        group_stride,
        rows,
        groups,
        threshold,
        min(band, 256),
        min(leak, 128),
    )
    return torch.tensor(moved, dtype=torch.int64)
