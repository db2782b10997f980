"""Votes in the torch backend: gradients become integers, and integers become flips.

Notation of the update rule: ``s = sign(g)``, accumulators ``A`` (votes for trits, of 8, 4 or 2
bits) and ``B`` (votes for exponents, int8), which saturate at the ends of their range: -128 and 127
for 8 bits. The sign is minus the gradient: a positive gradient moves a trit towards -1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import torch
from torch import Tensor

from arb_ternary.backends.integer import int_matmul
from arb_ternary.backends.layout import opened, pack_trits, power_of_two, unpack_trits
from arb_ternary.backends.protocol import WeightShape
from arb_ternary.backends.vote_state import EXPONENT_RANGE, VoteState
from arb_ternary.counters.hashing import uniform

#: Gradient elements in memory at a time while votes are cast.
_TILE: Final = 1 << 21


def may_be(condition: Tensor) -> bool:
    """Return a condition if reading it is free, on a CPU; else True: the host does not wait.

    The code that runs if it is True must not change a result for which it does not hold.
    """
    return condition.device.type != "cpu" or bool(condition.tolist())


def divided(values: Tensor, divisor: float) -> Tensor:
    """Return ``values / divisor`` with IEEE division on every device.

    On a GPU, torch's division by a number is a product with its rounded reciprocal.
    """
    return values / torch.full_like(values, divisor)


def quantize_gradient(grad_MN: Tensor, seed: int, step: int, stream: int) -> tuple[Tensor, Tensor]:
    """Round a gradient stochastically to int8 with one power-of-two scale.

    ``scale = 2**e`` with the smallest ``e`` such that ``max|g| <= 127 * scale``; ``q = floor(g /
    scale + u)`` with ``u`` from the counter hash of the flat index, clipped to -127..127. NaN gives
    0. A gradient of zeros, or one whose maximum is not finite, gives zeros and scale 1. For
    ``seed``, ``step`` and ``stream`` see :mod:`arb_ternary.counters.hashing`.

    Returns:
        ``q`` int8 ``[M, N]`` and ``scale``, a float32 scalar.
    """
    grad = grad_MN.to(torch.float32)
    largest = grad.new_zeros(())
    if grad.numel():
        largest = grad.nan_to_num(0.0, torch.inf, torch.inf).abs().amax()
    usable = torch.isfinite(largest) & (largest > 0)
    if may_be(~usable):
        grad = torch.where(usable, grad, 0.0)
        largest = torch.where(usable, largest, 127.0)
    # frexp: largest / 127 = mantissa * 2**e with mantissa in [0.5, 1); the power of two above it,
    # unless it is one.
    mantissa, exponent = torch.frexp(divided(largest.double(), 127.0))
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    scale = power_of_two(exponent.clamp(*EXPONENT_RANGE))

    noise = uniform(tuple(grad.shape), seed, step, stream, device=grad.device)
    rounded = noise.add_(grad / scale).floor_()
    rounded = rounded.clamp_(-127, 127).nan_to_num_(0.0)
    return rounded.to(torch.int8), scale


def _examine(g: Tensor, stats: Tensor, factor: Tensor | float) -> tuple[Tensor, Tensor, Tensor]:
    """Return a tile with NaN as 0 (no vote), and its sums of squares by row and by column.

    NaN are counted in ``stats``. The sums are multiplied by ``factor``.
    """
    squares = g.to(torch.float32).square()
    rows = squares.sum(dim=1)
    if g.is_floating_point() and may_be(~torch.isfinite(rows).all()):
        stats[0] += torch.isnan(g).sum()
        largest = torch.finfo(g.dtype).max
        g = g.nan_to_num(0.0, largest, -largest)
        squares = g.to(torch.float32).square()
        rows = squares.sum(dim=1)
    return g, rows.mul_(factor), squares.sum(dim=0).mul_(factor)


def _row_tiles(shape: WeightShape) -> Iterator[slice]:
    """Yield stretches of rows whose gradient, or whose votes, are in memory at a time."""
    rows = max(1, _TILE // max(1, shape.in_features))
    for start in range(0, shape.out_features, rows):
        yield slice(start, min(start + rows, shape.out_features))


def gradient_tiles(
    grad_MN: Tensor, x_MK: Tensor, shape: WeightShape
) -> Iterator[tuple[slice, Tensor]]:
    """Yield ``grad.T @ x`` for one stretch of rows at a time, in new memory.

    Two int8 operands give exact int32 or int64. Others give a product in the dtype of the gradient,
    at least bfloat16.
    """
    integer = grad_MN.dtype == torch.int8
    operand = grad_MN.dtype if integer else torch.promote_types(grad_MN.dtype, torch.bfloat16)
    x = x_MK if integer else x_MK.to(operand)
    for tile in _row_tiles(shape):
        grad_nM = grad_MN[:, tile].t()
        if integer:
            yield tile, int_matmul(grad_nM, x)
        else:
            yield tile, grad_nM.to(operand) @ x


def summed_rows(ids_M: Tensor, grad_MK: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distinct ids, ascending, and the sum of the gradients of each.

    Sums of an int8 gradient are int32, others float32.
    """
    rows_U, position_M = torch.unique(ids_M, return_inverse=True)
    columns = grad_MK.shape[1]
    dtype = torch.int32 if grad_MK.dtype == torch.int8 else torch.float32
    g_UK = torch.zeros(len(rows_U), columns, dtype=dtype, device=grad_MK.device)
    g_UK.index_add_(0, position_M, grad_MK.to(dtype))
    return rows_U, g_UK


def looked_up_rows(ids_M: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return what :func:`summed_rows` sums, for kernels on a device.

    The sizes of the results are known to the host without waiting for the device.

    Returns:
        ``names`` int64 ``[R]``, ``R = min(M, rows)``: the distinct ids, ascending, then rows that
        were not looked up. ``order`` ``[M]`` and ``starts`` ``[R + 1]``: ``order[starts[r] :
        starts[r + 1]]`` are the positions of ``names[r]`` among the ids, ascending; none for a row
        that was not looked up. bool ``[rows]``: whether a row was looked up.
    """
    counts_N = torch.zeros(rows, dtype=torch.int64, device=ids_M.device)
    counts_N.index_add_(0, ids_M, torch.ones_like(ids_M))
    present_N = counts_N > 0
    names = torch.argsort(present_N.to(torch.int8), stable=True, descending=True)
    names = names[: min(ids_M.numel(), rows)]
    ends = counts_N[names].cumsum(0)
    starts = torch.nn.functional.pad(ends, (1, 0))
    order = torch.argsort(ids_M, stable=True)
    return names, order, starts, present_N


def group_score(product_NK: Tensor, shape: WeightShape) -> Tensor:
    """Sum int8 ``[n, K]`` over each group of columns: int32 ``[n, J]``."""
    rows = product_NK.shape[0]
    padding = shape.groups * shape.group_size - shape.in_features
    if padding:
        product_NK = torch.nn.functional.pad(product_NK, (0, padding))
    grouped = product_NK.reshape(rows, shape.groups, shape.group_size)
    return grouped.sum(dim=2, dtype=torch.int32)


def _subtract_saturating_(
    accumulator: Tensor, amount: Tensor, low: int = -128, high: int = 127
) -> None:
    """``A = clip(A - amount, low, high)`` in place."""
    accumulator.copy_((accumulator.to(torch.int16) - amount).clamp_(low, high))


def _cast_(
    rows: slice | Tensor, gradient_nK: Tensor, scale: Tensor | None, state: VoteState
) -> None:
    """Cast the votes of the gradient of some rows of the weight, and add its statistics."""
    shape = state.shape
    stats = state.stats
    factor = 1.0 if scale is None else scale.square()
    g_nK, row_squares, column_squares = _examine(gradient_nK, stats, factor)
    stats[1 : 1 + shape.out_features][rows] += row_squares
    stats[1 + shape.out_features :] += column_squares
    s_nK = torch.sign(g_nK).to(torch.int8)
    correlation = state.correlation
    steps = state.steps
    with opened(state, rows) as (packed, votes_nK, exponent_votes):
        if exponent_votes is not None or correlation is not None:
            score_nJ = group_score(s_nK * unpack_trits(packed, shape.in_features), shape)
            if exponent_votes is not None:
                _subtract_saturating_(exponent_votes, torch.sign(score_nJ))
            if correlation is not None and steps is not None and isinstance(rows, Tensor):
                count_correlation_(correlation, steps, rows, score_nJ)
        _subtract_saturating_(votes_nK, s_nK, shape.smallest_vote, shape.largest_vote)


def cast_votes(grad_MN: Tensor, x_MK: Tensor, scale: Tensor | None, state: VoteState) -> None:
    """Cast the votes of one micro-batch.

    ``s = sign(grad_y.T @ x)``, ``A = sat8(A - s)``, ``B = sat8(B - sign(score))``. ``score[n, j]``
    is the int32 sum of ``s * T`` over a group. Mutates ``votes``, ``exponent_votes`` (unless None)
    and ``stats``, to which NaN gradients and row and column sums of squares of the gradient are
    added.

    Args:
        grad_MN: float gradient (row scales of int8 activations already folded in), or int8 with
            ``scale``.
        x_MK: float activations, or int8; both int8 selects the exact integer product.
        scale: float32 scalar, the power of two of an int8 gradient; it scales the statistics only.
    """
    for tile, product in gradient_tiles(grad_MN, x_MK, state.shape):
        _cast_(tile, product, scale, state)


def embedding_votes(ids_M: Tensor, grad_MK: Tensor, scale: Tensor | None, state: VoteState) -> None:
    """Cast the votes of the looked-up rows.

    Duplicates are summed before the sign is taken. Other rows stay bit-identical. Mutates
    ``votes``, ``exponent_votes``, ``stats``, ``correlation`` (scores are added) and ``steps``
    (updates are counted), the last two saturating; unless they are None. ``ids_M`` are int64, the
    row of each gradient row; an int8 gradient has its power of two in ``scale`` (float32 scalar)
    and is summed exactly.
    """
    if ids_M.numel():
        rows_U, g_UK = summed_rows(ids_M, grad_MK)
        _cast_(rows_U, g_UK, scale, state)


def count_correlation_(
    correlation: Tensor, steps: Tensor, rows_U: Tensor, score_UJ: Tensor
) -> None:
    """Add the scores of distinct rows to ``correlation`` ``[N, J]`` and 1 to their ``steps``.

    Both saturate.
    """
    total = correlation.index_select(0, rows_U).to(torch.int32) + score_UJ
    total.clamp_(-(2**15), 2**15 - 1)
    correlation.index_copy_(0, rows_U, total.to(torch.int16))
    counted = steps.index_select(0, rows_U).to(torch.int64) + 1
    counted.clamp_(max=2**31 - 1)
    steps.index_copy_(0, rows_U, counted.to(torch.int32))


def _crossings(accumulator: Tensor, threshold: int) -> Tensor:
    """``[A >= theta] - [A <= -theta]`` in int8."""
    # Either clamp is a step of one, and their offsets cancel.
    above = accumulator.clamp(threshold - 1, threshold)
    return above.add_(accumulator.clamp(-threshold, 1 - threshold))


def _clear_(accumulator: Tensor, where: Tensor) -> None:
    """``A[where != 0] = 0`` for ``where`` in {-1, 0, 1}."""
    # A product is several times faster than a mask.
    accumulator.sub_(accumulator * where.abs())


def _leak_(accumulator: Tensor, leak: int) -> None:
    """Move every accumulator ``leak`` units towards zero, not past it."""
    if leak:
        wide = accumulator.to(torch.int16)
        size = (wide.abs() - leak).clamp_(min=0)
        accumulator.copy_(torch.sign(wide) * size)


def flip_(
    state: VoteState, threshold: int, carry: bool, decay_: Callable[[slice, Tensor], None]
) -> Tensor:
    """Turn crossings into flips, some rows at a time, then call ``decay_(rows, votes)``.

    Returns:
        The number of trits that changed.
    """
    shape = state.shape
    flips = torch.zeros((), dtype=torch.int64, device=state.weight.device)
    for tile in _row_tiles(shape):
        with opened(state, tile) as (packed, votes_nK, _):
            low = high = votes_nK.new_zeros(())
            if votes_nK.numel():
                low, high = votes_nK.aminmax()
            if may_be((high >= threshold) | (low <= -threshold)):
                crossed = _crossings(votes_nK, threshold)
                before = unpack_trits(packed, shape.in_features)
                after = (before + crossed).clamp_(-1, 1)
                moved = after - before
                flips += torch.count_nonzero(moved)
                packed.copy_(pack_trits(after))
                if carry:
                    # A crossing that moves its trit is worth theta votes. At the rail the
                    # accumulator goes back to half a cell.
                    stuck = crossed - moved
                    votes_nK.sub_(moved * threshold)
                    _clear_(votes_nK, stuck)
                    votes_nK.add_(stuck * (threshold // 2))
                else:
                    _clear_(votes_nK, crossed)
            decay_(tile, votes_nK)
    return flips


def apply_votes(state: VoteState, threshold: int, leak: int) -> Tensor:
    """Turn crossings into flips.

    ``f = [A >= theta] - [A <= -theta]``, ``T = clip(T + f, -1, 1)``, ``A[f != 0] = 0``. A trit
    moves at most one step. Mutates ``weight`` and ``votes``; returns the number of trits that
    changed (int64 scalar).

    Args:
        threshold: ``theta``, 1 to the largest vote: 127, 7 or 1.
        leak: units by which every accumulator then moves towards zero; 0 for none.
    """
    return flip_(state, threshold, False, lambda _, votes_nK: _leak_(votes_nK, leak))


def apply_exponent_votes(state: VoteState, threshold: int, band: int, leak: int) -> Tensor:
    """Turn crossings of exponents into steps.

    ``up = [B >= theta] - [B <= -theta]``, ``E = clip(E + up, E0 - band, E0 + band)``, ``B = B -
    theta * up``. ``E`` also stays within -126..127, where ``2**E`` is a normal float32. Mutates
    ``exponent`` and ``exponent_votes``; returns the number of exponents that changed (int64
    scalar).

    Args:
        state: with ``exponent_votes``; ``E0`` is its ``origin``.
        threshold: ``theta``, 1..127.
        band: how far an exponent may move from its origin.
        leak: as in :func:`apply_votes`.
    """
    exponent = state.exponent
    exponent_votes = state.learned
    up = _crossings(exponent_votes, threshold)
    centre = state.origin.to(torch.int16)
    wanted = exponent.to(torch.int16) + up
    wanted = wanted.maximum(centre - band).minimum(centre + band)
    wanted.clamp_(*EXPONENT_RANGE)
    moved = (wanted != exponent).sum()
    exponent.copy_(wanted)
    spent = threshold * up.to(torch.int16)
    exponent_votes.copy_(exponent_votes.to(torch.int16) - spent)
    _leak_(exponent_votes, leak)
    return moved
