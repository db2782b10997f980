"""Gradients of products turned into votes: check arguments, launch kernels, add parts of sums.

Meaning and signatures are those of ``arb_ternary.backends.reference``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from attrs import frozen
from torch import Tensor

from arb_ternary.backends.arguments import check_groups, vote_dtype
from arb_ternary.backends.protocol import WeightShape
from arb_ternary.backends.vote_state import VoteLimits, VoteState
from arb_ternary.counters.hashing import (
    USE_EXPONENT_ROUNDING,
    USE_VOTE_ROUNDING,
    HashKeys,
    hash_keys,
)
from arb_ternary_tilelang.arguments import (
    FLOATS,
    UNIT,
    nothing,
    packed_bytes,
    readable,
    require,
    served,
    words,
    writable,
)
from arb_ternary_tilelang.kernels import votes as programs
from arb_ternary_tilelang.lane import Lane, Tiles, lane_of
from arb_ternary_tilelang.storage import held_votes, stored_size

#: Most rows of int8 gradients, whose products sum in 32 bits: 128 * 128 * 131071 < 2**31.
MOST_ROWS: Final = 131071


def kernels() -> dict[str, Callable[..., object]]:
    """Return the kernels of this module by op."""
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

    def keys(self, use: int, count: int) -> HashKeys:
        """The keys of the hash for this use and ``count`` elements."""
        seed, step, stream = self.draw
        return hash_keys(seed, step, stream + use, count)

    @property
    def kind(self) -> int:
        """The kind of vote that the factors select."""
        if self.factors.dtype is torch.int32:
            return programs.SHIFTS
        return programs.FACTORS


@frozen(eq=False)
class Target:
    """The checked tensors that votes are cast into.

    ``names`` are the rows of a lookup, or None if all rows of the weight vote.
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
        """The number of rows that vote."""
        if self.names is None:
            return self.shape.out_features
        return self.names.shape[0]


def target_of(
    scale: Tensor | None,
    state: VoteState,
    names: Tensor | None = None,
) -> Target:
    """Check the tensors of a state that votes are cast into."""
    shape = state.shape
    packed = state.weight
    check_groups(shape, UNIT)
    device = packed.device
    rows = shape.out_features
    columns = shape.in_features
    held = readable(packed, "packed", torch.uint8, (rows, packed_bytes(columns)), device)
    stored = writable(state.votes, "votes", vote_dtype(shape), stored_size(shape), device)
    learned = state.exponent_votes
    if learned is not None:
        groups = shape.groups if columns else 0
        learned = writable(learned, "exponent_votes", torch.int8, (rows, groups), device)
    sums = writable(state.stats, "stats", torch.float32, (1 + rows + columns,), device)
    if scale is not None:
        scale = readable(scale.reshape(1), "scale", torch.float32, (1,), device)
    return Target(
        shape=shape,
        words=words(held),
        votes=held_votes(stored, shape),
        exponent_votes=learned,
        stats=sums,
        scale=scale,
        names=names,
    )


def scaled_of(target: Target, gradient: Tensor, state: VoteState) -> Scaled:
    """Check the arguments of scaled votes."""
    integer = target.scale is not None and gradient.dtype is torch.int8
    limits = state.check_scaling(integer)
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
    """Lay ``[M, C]`` out as ``[ceil(M / depth), C, depth]``, padded with zeros.

    The terms of a sum lie side by side.
    """
    rows, columns = matrix.shape
    padded = torch.nn.functional.pad(matrix, (0, 0, 0, -rows % depth))
    return padded.view(-1, depth, columns).transpose(1, 2).contiguous()


def _operands(
    lane: Lane,
    tiles: Tiles,
    grad: Tensor,
    x: Tensor,
    target: Target,
) -> tuple[Tensor, Tensor]:
    """Return the operands of ``grad.T @ x`` for a kernel."""
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
            depth = lane.depth(tiles, "int8")
            a = _blocks(a, depth)
            b = _blocks(b, depth)
        return a, b
    grad = served(lane, grad, "grad")
    if not (lane.cuda and x.dtype is torch.int8):
        x = x.to(grad.dtype)
    a = readable(grad, "grad", grad.dtype, (rows, shape.out_features), device)
    b = readable(x, "x", x.dtype, (rows, shape.in_features), device)
    return a, b


# --- casting


def cast(
    source: str,
    lane: Lane,
    tiles: Tiles,
    operands: tuple[Tensor, Tensor, Tensor, Tensor],
    target: Target,
    scaled: Scaled | None,
    learns: bool,
) -> Tensor:
    """Cast the votes, add the statistics and vote for exponents.

    Args:
        source: where the gradient comes from: a product or a lookup.
        lane: the target of the kernels.
        tiles: tiles of the kernel.
        operands: the two of a product, then the order and the starts of a lookup.
        target: what votes are cast into.
        scaled: arguments of scaled votes.
        learns: whether scores are wanted.

    Returns:
        The scores ``[rows, J]`` for the exponents.
    """
    a, b, order, starts = operands
    kind = programs.SIGN if scaled is None else scaled.kind
    rule = programs.Rule(
        source=source,
        kind=lane.option(kind),
        grad=FLOATS.get(a.dtype, "int8"),
        x=FLOATS.get(b.dtype, "int8"),
        bits=target.shape.vote_bits,
        # One build for both on the CPU, where nothing is gained by leaving scores out.
        learns=learns or not lane.cuda,
    )
    shape = target.shape
    device = target.words.device
    rows = target.rows
    columns = shape.in_features
    across = -(-columns // tiles.columns)
    down = -(-rows // tiles.rows)
    sizes = torch.int64 if rule.integer else torch.float32

    def parts(wanted: bool, size: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """Memory for sums, one row per tile; empty if they are not wanted."""
        if not wanted:
            size = (0, 0)
        return torch.empty(size, dtype=dtype, device=device)

    row_squares = parts(True, (across, rows), torch.float32)
    column_squares = parts(True, (down, columns), torch.float32)
    row_sizes = parts(scaled is not None, (across, rows), sizes)
    column_sizes = parts(scaled is not None, (down, columns), sizes)
    faults = parts(not rule.integer, (across, rows), torch.int32)
    scores_size = (rows, shape.groups) if rule.learns else (1, 1)
    scores = torch.zeros(scores_size, dtype=torch.int32, device=device)

    scale = target.scale
    if scale is None:
        scale = torch.ones(1, device=device)
    names = target.names
    if names is None:
        names = nothing(device, torch.int64)
    factors = nothing(device)
    vote_limit = 0
    noise_shift = 0
    key_0 = 0
    key_1 = 0
    if scaled is not None:
        factors = scaled.factors
        vote_limit = scaled.limits.vote_limit
        noise_shift = scaled.limits.noise_shift
        key_0, key_1, _ = scaled.keys(USE_VOTE_ROUNDING, shape.out_features * columns)

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
        names,
        target.words,
        target.votes,
        scores,
        scale,
        factors.view(torch.int32),
        row_squares,
        column_squares,
        row_sizes,
        column_sizes,
        faults,
        shape.group_size,
        vote_limit,
        noise_shift,
        key_0,
        key_1,
        kind,
    )
    _add_statistics(target, row_squares.sum(dim=0), column_squares.sum(dim=0), faults)
    if scaled is not None:
        _add_magnitudes(target, scaled, row_sizes.sum(dim=0), column_sizes.sum(dim=0))
    _settle(lane, scores, target, scaled)
    return scores


def _add_statistics(
    target: Target,
    squares_R: Tensor,
    squares_K: Tensor,
    faults: Tensor,
) -> None:
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


def _add_magnitudes(
    target: Target,
    scaled: Scaled,
    sizes_R: Tensor,
    sizes_K: Tensor,
) -> None:
    rows = target.shape.out_features
    sizes_R = sizes_R.to(torch.float32)
    sizes_K = sizes_K.to(torch.float32)
    if target.scale is not None:
        sizes_R = sizes_R * target.scale
        sizes_K = sizes_K * target.scale
    _add_rows(scaled.magnitudes[:rows], sizes_R, target.names)
    scaled.magnitudes[rows:] += sizes_K


def _add_rows(total_N: Tensor, part_R: Tensor, names: Tensor | None) -> None:
    if names is None:
        total_N += part_R
    else:
        total_N[names] += part_R  # every name occurs once


def _settle(lane: Lane, scores: Tensor, target: Target, scaled: Scaled | None) -> None:
    """Turn scores into exponent votes, if the target has any."""
    if target.exponent_votes is None:
        return
    is_scaled = scaled is not None
    key_0 = 0
    key_1 = 0
    shift = 0
    if scaled is not None:
        shift = scaled.limits.exponent_shift
        count = target.exponent_votes.numel()
        key_0, key_1, _ = scaled.keys(USE_EXPONENT_ROUNDING, count)
    names = target.names
    is_mapped = names is not None
    if names is None:
        names = nothing(scores.device, torch.int64)
    kernel = lane.kernel(
        programs.settle,
        lane.option(is_scaled),
        lane.option(is_mapped),
    )
    kernel(
        scores,
        names,
        target.exponent_votes,
        shift,
        key_0,
        key_1,
        int(is_scaled),
        int(is_mapped),
    )


def _cast_product(grad_MN: Tensor, x_MK: Tensor, target: Target, scaled: Scaled | None) -> None:
    shape = target.shape
    device = target.words.device
    lane = lane_of(device)
    tiles = lane.tiles.votes
    a, b = _operands(lane, tiles, grad_MN, x_MK, target)
    if 0 in (x_MK.shape[0], shape.out_features, shape.in_features):
        return
    none = nothing(device, torch.int64)
    learns = target.exponent_votes is not None
    cast(programs.PRODUCT, lane, tiles, (a, b, none, none), target, scaled, learns)


def cast_votes(
    grad_MN: Tensor,
    x_MK: Tensor,
    scale: Tensor | None,
    state: VoteState,
) -> None:
    """Cast one micro-batch's sign votes; mutates ``votes``, ``exponent_votes`` and ``stats``."""
    target = target_of(scale, state)
    _cast_product(grad_MN, x_MK, target, None)


def cast_scaled_votes(
    grad_MN: Tensor,
    x_MK: Tensor,
    scale: Tensor | None,
    state: VoteState,
) -> None:
    """Cast one micro-batch's scaled votes.

    Mutates ``votes``, ``exponent_votes``, ``stats`` and ``magnitudes``.
    """
    target = target_of(scale, state)
    scaled = scaled_of(target, grad_MN, state)
    _cast_product(grad_MN, x_MK, target, scaled)
