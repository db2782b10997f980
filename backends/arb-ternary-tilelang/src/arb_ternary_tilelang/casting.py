"""Gradients of products turned into votes: arguments checked, parts of sums added, kernels
launched.

Meaning and signatures are those of ``arb_ternary.backends.reference``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from attrs import frozen
from torch import Tensor

from arb_ternary.backends.protocol import WeightShape
from arb_ternary.backends.vote_state import VoteLimits, VoteState
from arb_ternary.counters.hashing import USE_EXPONENT_ROUNDING, USE_VOTE_ROUNDING
from arb_ternary_tilelang.arguments import (
    FLOATS,
    check_shape,
    keys,
    packed_bytes,
    readable,
    require,
    words,
    writable,
)
from arb_ternary_tilelang.kernels import votes as programs
from arb_ternary_tilelang.lane import Lane, Tiles
from arb_ternary_tilelang.lanes import lane_of
from arb_ternary_tilelang.storage import held_votes, stored_size, vote_dtype

#: Rows whose int8 gradients and activations surely sum in 32 bits: 128 * 128 * 131071 < 2**31.
MOST_ROWS: Final = 131071


def kernels() -> dict[str, Callable[..., object]]:
    """The kernels of this module."""
    return {
        "cast_votes": cast_votes,
        "cast_scaled_votes": cast_scaled_votes,
    }


@frozen(eq=False)
class Scaled:
    """Arguments of scaled votes, checked."""

    magnitudes: Tensor
    factors: Tensor
    limits: VoteLimits
    draw: tuple[int, int, int]

    def keys(self, use: int, count: int) -> tuple[int, int]:
        """The hash's keys for this use and so many elements."""
        seed, step, stream = self.draw
        return keys(seed, step, stream + use, count)

    @property
    def kind(self) -> int:
        """Which rule the factors select."""
        return programs.SHIFTS if self.factors.dtype is torch.int32 else programs.FACTORS


@frozen(eq=False)
class Target:
    """What votes are cast into, checked; ``rows`` are those of a lookup, None where all rows of the
    weight vote.
    """

    shape: WeightShape
    words: Tensor
    votes: Tensor
    exponent_votes: Tensor | None
    stats: Tensor
    scale: Tensor | None
    names: Tensor | None

    @property
    def rows(self) -> int:
        """Rows that vote."""
        return self.shape.out_features if self.names is None else self.names.shape[0]


def target_of(scale: Tensor | None, state: VoteState, names: Tensor | None = None) -> Target:
    shape = state.shape
    packed = state.weight
    check_shape(shape)
    device = packed.device
    rows = shape.out_features
    columns = shape.in_features
    held = readable(packed, "packed", torch.uint8, (rows, packed_bytes(columns)), device)
    stored = writable(state.votes, "votes", vote_dtype(shape.vote_bits), stored_size(shape), device)
    learned = state.exponent_votes
    if learned is not None:
        learned = writable(
            learned, "exponent_votes", torch.int8, (rows, shape.groups if columns else 0), device
        )
    sums = writable(state.stats, "stats", torch.float32, (1 + rows + columns,), device)
    unit = (
        None if scale is None else readable(scale.reshape(1), "scale", torch.float32, (1,), device)
    )
    return Target(shape, words(held), held_votes(stored, shape), learned, sums, unit, names)


def scaled_of(target: Target, gradient: Tensor, state: VoteState) -> Scaled:
    limits = state.check_scaling(target.scale is not None and gradient.dtype is torch.int8)
    magnitudes, vote_scale = state.scaling
    shape = target.shape
    device = target.words.device
    size = (shape.out_features + shape.in_features,)
    kind = torch.int32 if vote_scale.dtype is torch.int32 else torch.float32
    factors = readable(vote_scale, "vote_scale", kind, size, device)
    sums = writable(magnitudes, "magnitudes", torch.float32, size, device)
    return Scaled(sums, factors, limits, state.draw())


# --- operands


def _blocks(matrix: Tensor, depth: int) -> Tensor:
    """``[M, C]`` as ``[ceil(M / depth), C, depth]``: the terms of a sum side by side, zeros at the
    end.
    """
    rows, columns = matrix.shape
    padded = torch.nn.functional.pad(matrix, (0, 0, 0, -rows % depth))
    return padded.view(-1, depth, columns).transpose(1, 2).contiguous()


def _operands(
    lane: Lane, tiles: Tiles, grad: Tensor, x: Tensor, target: Target
) -> tuple[Tensor, Tensor, str, str]:
    """The operands of ``grad.T @ x`` as a kernel reads them, and the names of their dtypes."""
    shape = target.shape
    device = target.words.device
    rows = x.shape[0]
    require(
        x.dim() == 2 and grad.dim() == 2,
        f"grad and x must be matrices, got {grad.dim()} and {x.dim()} dimensions",
    )
    if grad.dtype is torch.int8:
        require(x.dtype is torch.int8, f"an int8 gradient needs int8 activations, got {x.dtype}")
        require(
            rows <= MOST_ROWS,
            f"int8 gradients of more than {MOST_ROWS} rows overflow 32 bits, got {rows}",
        )
        a = readable(grad, "grad", torch.int8, (rows, shape.out_features), device)
        b = readable(x, "x", torch.int8, (rows, shape.in_features), device)
        if lane.cuda:
            a = _blocks(a, tiles.depth)
            b = _blocks(b, tiles.depth)
        return a, b, "int8", "int8"
    grad = served(lane, grad, "grad")
    if not (lane.cuda and x.dtype is torch.int8):
        x = x.to(grad.dtype)
    a = readable(grad, "grad", grad.dtype, (rows, shape.out_features), device)
    b = readable(x, "x", x.dtype, (rows, shape.in_features), device)
    return a, b, FLOATS[a.dtype], FLOATS.get(b.dtype, "int8")


def served(lane: Lane, grad: Tensor, name: str) -> Tensor:
    if grad.dtype not in FLOATS:
        raise TypeError(
            f"{name}: the tilelang backend serves int8, float32, bfloat16 and float16, got "
            f"{grad.dtype}"
        )
    return grad if lane.cuda else grad.to(torch.float32)


# --- casting


def launch(
    lane: Lane,
    tiles: Tiles,
    rule: programs.Rule,
    a: Tensor,
    b: Tensor,
    order: Tensor,
    starts: Tensor,
    target: Target,
    scaled: Scaled | None,
) -> Tensor:
    """Cast the votes and add the statistics; returns the scores ``[rows, J]`` for the exponents."""
    shape = target.shape
    device = target.words.device
    rows = target.rows
    columns = shape.in_features
    across = -(-columns // tiles.columns)
    down = -(-rows // tiles.rows)
    sizes = torch.int64 if rule.integer else torch.float32
    none = torch.empty((0, 0), device=device)
    scores = torch.zeros(
        (rows, shape.groups) if rule.learns else (1, 1), dtype=torch.int32, device=device
    )
    row_squares = torch.empty((across, rows), dtype=torch.float32, device=device)
    column_squares = torch.empty((down, columns), dtype=torch.float32, device=device)
    row_sizes = (
        torch.empty((across, rows), dtype=sizes, device=device) if scaled else none.to(sizes)
    )
    column_sizes = (
        torch.empty((down, columns), dtype=sizes, device=device) if scaled else none.to(sizes)
    )
    faults = (
        none.to(torch.int32)
        if rule.integer
        else torch.empty((across, rows), dtype=torch.int32, device=device)
    )
    scale = torch.ones(1, device=device) if target.scale is None else target.scale
    draw = (0, 0)
    if scaled is not None:
        draw = scaled.keys(USE_VOTE_ROUNDING, shape.out_features * columns)
    kernel = lane.kernel(
        programs.cast,
        rule,
        tiles,
        N=shape.out_features,
        K=columns,
        G=min(shape.group_size, max(columns, 1)),
    )
    kernel(
        a,
        b,
        order,
        starts,
        none.to(torch.int64).view(0) if target.names is None else target.names,
        target.words,
        target.votes,
        scores,
        scale,
        (none.view(0) if scaled is None else scaled.factors).view(torch.int32),
        row_squares,
        column_squares,
        row_sizes,
        column_sizes,
        faults,
        shape.group_size,
        0 if scaled is None else scaled.limits.vote_limit,
        0 if scaled is None else scaled.limits.noise_shift,
        *draw,
        programs.SIGN if scaled is None else scaled.kind,
    )
    _add_statistics(target, row_squares.sum(dim=0), column_squares.sum(dim=0), faults)
    if scaled is not None:
        _add_magnitudes(target, scaled, row_sizes.sum(dim=0), column_sizes.sum(dim=0))
    return scores


def _add_statistics(target: Target, squares_R: Tensor, squares_K: Tensor, faults: Tensor) -> None:
    stats = target.stats
    rows = target.shape.out_features
    if target.scale is not None:
        factor = target.scale.square()
        squares_R = squares_R * factor
        squares_K = squares_K * factor
    if faults.numel():
        stats[0] += faults.sum()
    _add_rows(stats[1 : 1 + rows], squares_R, target.names)
    stats[1 + rows :] += squares_K


def _add_magnitudes(target: Target, scaled: Scaled, sizes_R: Tensor, sizes_K: Tensor) -> None:
    rows = target.shape.out_features
    if target.scale is not None:
        sizes_R, sizes_K = (sizes.to(torch.float32) * target.scale for sizes in (sizes_R, sizes_K))
    _add_rows(scaled.magnitudes[:rows], sizes_R.to(torch.float32), target.names)
    scaled.magnitudes[rows:] += sizes_K.to(torch.float32)


def _add_rows(total_N: Tensor, part_R: Tensor, names: Tensor | None) -> None:
    if names is None:
        total_N += part_R
    else:
        total_N[names] += part_R  # every name is there once


def settle(lane: Lane, scores: Tensor, target: Target, scaled: Scaled | None) -> None:
    if target.exponent_votes is None:
        return
    draw = (0, 0)
    shift = 0
    if scaled is not None:
        shift = scaled.limits.exponent_shift
        draw = scaled.keys(USE_EXPONENT_ROUNDING, target.exponent_votes.numel())
    names = scores.new_empty(0, dtype=torch.int64) if target.names is None else target.names
    options = scaled is not None, target.names is not None
    kernel = lane.kernel(programs.settle, *map(lane.option, options))
    kernel(scores, names, target.exponent_votes, shift, *draw, *map(int, options))


def _cast_product(grad_MN: Tensor, x_MK: Tensor, target: Target, scaled: Scaled | None) -> None:
    shape = target.shape
    device = target.words.device
    lane = lane_of(device)
    tiles = lane.vote_tiles
    a, b, grad_name, x_name = _operands(lane, tiles, grad_MN, x_MK, target)
    if 0 in (x_MK.shape[0], shape.out_features, shape.in_features):
        return
    kind = lane.option(programs.SIGN if scaled is None else scaled.kind)
    # One build for both on the CPU, where nothing is gained by leaving scores out.
    learns = target.exponent_votes is not None or not lane.cuda
    rule = programs.Rule(programs.PRODUCT, kind, grad_name, x_name, shape.vote_bits, learns)
    none = torch.empty(0, dtype=torch.int64, device=device)
    scores = launch(lane, tiles, rule, a, b, none, none, target, scaled)
    settle(lane, scores, target, scaled)


def cast_votes(grad_MN: Tensor, x_MK: Tensor, scale: Tensor | None, state: VoteState) -> None:
    """Cast one micro-batch's sign votes; mutates ``votes``, ``exponent_votes`` and ``stats``."""
    _cast_product(grad_MN, x_MK, target_of(scale, state), None)


def cast_scaled_votes(
    grad_MN: Tensor, x_MK: Tensor, scale: Tensor | None, state: VoteState
) -> None:
    """Cast one micro-batch's scaled votes; mutates ``votes``, ``exponent_votes``, ``stats`` and
    ``magnitudes``.
    """
    target = target_of(scale, state)
    _cast_product(grad_MN, x_MK, target, scaled_of(target, grad_MN, state))
