"""Votes in the torch backend: gradients turned into integers, integers into flips.

Notation of the update rule: ``s = sign(g)``, accumulators ``A`` (votes for trits) and ``B`` (votes for exponents), both
int8 with saturation at -128 and 127. The sign is minus the gradient: a positive gradient moves a trit towards -1.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from arb_ternary.backends.integer import int_matmul
from arb_ternary.backends.layout import pack_trits, unpack_trits
from arb_ternary.backends.protocol import WeightShape
from arb_ternary.ternary.hashing import uniform

__all__ = [
    "apply_exponent_votes",
    "apply_votes",
    "cast_votes",
    "embedding_votes",
    "quantize_gradient",
    "stats_size",
]

#: Gradient elements held at a time while votes are cast.
_TILE: Final = 1 << 21
#: Exponents for which ``2**E`` is a normal float32.
EXPONENT_RANGE: Final = (-126, 127)


def stats_size(shape: WeightShape) -> int:
    """Elements of the statistics vector: NaN count, ``N`` row sums of squares, ``K`` column sums of squares."""
    return 1 + shape.out_features + shape.in_features


def quantize_gradient(grad_MN: Tensor, seed: int, step: int, stream: int) -> tuple[Tensor, Tensor]:
    """Stochastic rounding of a gradient to int8 with one power-of-two scale.

    ``scale = 2**e`` with the smallest ``e`` such that ``max|g| <= 127 * scale``; ``q = floor(g / scale + u)`` with
    ``u`` from the counter hash of the flat index, clipped to -127..127. NaN gives 0. A gradient of zeros, or one
    whose maximum is not finite, gives zeros and scale 1.

    Args:
        grad_MN: float.
        seed: of the run.
        step: optimizer steps taken.
        stream: tensor and use within the step (:func:`arb_ternary.ternary.hashing.stream_id` and a salt).

    Returns:
        ``q`` int8 ``[M, N]``, ``scale`` float32 scalar.
    """
    grad = grad_MN.to(torch.float32)
    largest = grad.nan_to_num(0.0, torch.inf, torch.inf).abs().amax() if grad.numel() else grad.new_zeros(())
    if not bool(torch.isfinite(largest)) or not bool(largest > 0):
        return torch.zeros(grad.shape, dtype=torch.int8, device=grad.device), torch.ones((), device=grad.device)
    # frexp: largest / 127 = mantissa * 2**e with mantissa in [0.5, 1); the power of two above it, unless it is one.
    mantissa, exponent = torch.frexp(largest.double() / 127.0)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent).clamp(*EXPONENT_RANGE)
    scale = ((exponent.to(torch.int32) + 127) << 23).view(torch.float32)
    noise = uniform(tuple(grad.shape), seed, step, stream, device=grad.device)
    rounded = noise.add_(grad / scale).floor_().clamp_(-127, 127).nan_to_num_(0.0)
    return rounded.to(torch.int8), scale


def _examine(g: Tensor, stats: Tensor, factor: Tensor | float) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient tile with NaN replaced by 0 (which casts no vote) and counted, and its sums of squares.

    Returns:
        the tile, and the sums of squares by row and by column, times ``factor``.
    """
    squares = g.to(torch.float32).square()
    rows = squares.sum(dim=1)
    if not bool(torch.isfinite(rows).all()):
        stats[0] += torch.isnan(g).sum()
        g = g.nan_to_num(0.0, torch.finfo(g.dtype).max, torch.finfo(g.dtype).min)
        squares = g.to(torch.float32).square()
        rows = squares.sum(dim=1)
    return g, rows.mul_(factor), squares.sum(dim=0).mul_(factor)


def _group_score(product_NK: Tensor, shape: WeightShape) -> Tensor:
    """Sum int8 ``[N, K]`` over each group of columns: int32 ``[N, J]``."""
    rows = product_NK.shape[0]
    padding = shape.groups * shape.group_size - shape.in_features
    padded = torch.nn.functional.pad(product_NK, (0, padding)) if padding else product_NK
    return padded.reshape(rows, shape.groups, shape.group_size).sum(dim=2, dtype=torch.int32)


def _subtract_saturating_(accumulator: Tensor, amount: Tensor) -> None:
    accumulator.copy_((accumulator.to(torch.int16) - amount).clamp_(-128, 127))


def _vote_(g_NK: Tensor, packed: Tensor, votes_NK: Tensor, exponent_votes: Tensor | None, shape: WeightShape) -> None:
    """Cast the votes of one gradient tile (rows of the weight)."""
    s_NK = torch.sign(g_NK).to(torch.int8)
    if exponent_votes is not None:
        score_NJ = _group_score(s_NK * unpack_trits(packed, shape.in_features), shape)
        _subtract_saturating_(exponent_votes, torch.sign(score_NJ))
    _subtract_saturating_(votes_NK, s_NK)


def cast_votes(
    grad_MN: Tensor,
    x_MK: Tensor,
    scale: Tensor | None,
    packed: Tensor,
    votes: Tensor,
    exponent_votes: Tensor | None,
    stats: Tensor,
    shape: WeightShape,
) -> None:
    """Cast one micro-batch's votes: ``s = sign(grad_y.T @ x)``, ``A = sat8(A - s)``, ``B = sat8(B - sign(score))``.

    ``score[n, j]`` is the int32 sum of ``s * T`` over a group. Mutates ``votes``, ``exponent_votes`` and ``stats``.

    Args:
        grad_MN: float gradient (row scales of int8 activations already folded in), or int8 with ``scale``.
        x_MK: float activations, or int8; both int8 selects the exact integer product.
        scale: float32 scalar, the power of two of an int8 gradient; it scales the statistics only.
        packed: weight in the backend's layout.
        votes: int8, the backend's layout.
        exponent_votes: int8 ``[N, J]``; None when the exponents do not learn.
        stats: float32 ``[1 + N + K]``: NaN gradients, row and column sums of squares of the gradient are added.
        shape: logical shape of the weight.
    """
    integer = grad_MN.dtype == torch.int8
    operand = grad_MN.dtype if integer else torch.promote_types(grad_MN.dtype, torch.bfloat16)
    x = x_MK if integer else x_MK.to(operand)
    factor = scale.square() if scale is not None else 1.0
    rows_a_tile = max(1, _TILE // max(1, shape.in_features))
    votes_NK = votes.view(shape.out_features, shape.in_features)
    row_squares = stats[1 : 1 + shape.out_features]
    column_squares = stats[1 + shape.out_features :]
    for start in range(0, shape.out_features, rows_a_tile):
        stop = min(start + rows_a_tile, shape.out_features)
        tile_MN = grad_MN[:, start:stop]
        g_NK = int_matmul(tile_MN.t(), x) if integer else tile_MN.t().to(operand) @ x
        g_NK, tile_rows, tile_columns = _examine(g_NK, stats, factor)
        row_squares[start:stop] += tile_rows
        column_squares += tile_columns
        exponents = None if exponent_votes is None else exponent_votes[start:stop]
        rows = WeightShape(stop - start, shape.in_features, shape.group_size)
        _vote_(g_NK, packed[start:stop], votes_NK[start:stop], exponents, rows)


def embedding_votes(
    ids_M: Tensor,
    grad_MK: Tensor,
    scale: Tensor | None,
    packed: Tensor,
    votes: Tensor,
    exponent_votes: Tensor | None,
    correlation: Tensor | None,
    steps: Tensor | None,
    stats: Tensor,
    shape: WeightShape,
) -> None:
    """Votes of the looked-up rows; duplicates are summed before the sign, untouched rows stay bit-identical.

    Mutates ``votes``, ``exponent_votes``, ``correlation``, ``steps`` and ``stats``.

    Args:
        ids_M: int64 row of each gradient row.
        grad_MK: float, or int8 with ``scale`` (then summed exactly).
        scale: float32 scalar, the power of two of an int8 gradient.
        packed: weight in the backend's layout.
        votes: int8, the backend's layout.
        exponent_votes: int8 ``[N, J]``; None when the exponents do not learn by residual votes.
        correlation: int16 ``[N, J]``: the score is added, saturating; None unless the correlation rule is on.
        steps: int32 ``[N, J]``: updates counted for ``correlation``, saturating.
        stats: as in :func:`cast_votes`.
        shape: logical shape of the weight.
    """
    if ids_M.numel() == 0:
        return
    rows_U, position_M = torch.unique(ids_M, return_inverse=True)
    summed_dtype = torch.int32 if grad_MK.dtype == torch.int8 else torch.float32
    g_UK = torch.zeros(rows_U.shape[0], shape.in_features, dtype=summed_dtype, device=grad_MK.device)
    g_UK.index_add_(0, position_M, grad_MK.to(summed_dtype))
    factor = scale.square() if scale is not None else 1.0
    g_UK, row_squares, column_squares = _examine(g_UK, stats, factor)
    stats[1 : 1 + shape.out_features].index_add_(0, rows_U, row_squares)
    stats[1 + shape.out_features :] += column_squares

    touched = WeightShape(rows_U.shape[0], shape.in_features, shape.group_size)
    packed_U = packed.index_select(0, rows_U)
    votes_U = votes.view(shape.out_features, -1).index_select(0, rows_U)
    exponents_U = None if exponent_votes is None else exponent_votes.index_select(0, rows_U)
    if correlation is not None and steps is not None:
        score_UJ = _group_score(torch.sign(g_UK).to(torch.int8) * unpack_trits(packed_U, shape.in_features), touched)
        total = correlation.index_select(0, rows_U).to(torch.int32) + score_UJ
        correlation.index_copy_(0, rows_U, total.clamp_(-(2**15), 2**15 - 1).to(torch.int16))
        counted = steps.index_select(0, rows_U).to(torch.int64) + 1
        steps.index_copy_(0, rows_U, counted.clamp_(max=2**31 - 1).to(torch.int32))
    _vote_(g_UK, packed_U, votes_U, exponents_U, touched)
    votes.view(shape.out_features, -1).index_copy_(0, rows_U, votes_U)
    if exponent_votes is not None and exponents_U is not None:
        exponent_votes.index_copy_(0, rows_U, exponents_U)


def _crossings(accumulator: Tensor, threshold: int) -> Tensor:
    """``[A >= theta] - [A <= -theta]`` as int8."""
    return (accumulator >= threshold).to(torch.int8) - (accumulator <= -threshold).to(torch.int8)


def _leak_(accumulator: Tensor, leak: int) -> None:
    """Move every accumulator ``leak`` units towards zero, not past it."""
    if leak:
        wide = accumulator.to(torch.int16)
        accumulator.copy_(torch.sign(wide) * (wide.abs() - leak).clamp_(min=0))


def apply_votes(packed: Tensor, votes: Tensor, threshold: int, leak: int, shape: WeightShape) -> Tensor:
    """Turn crossings into flips: ``f = [A >= theta] - [A <= -theta]``, ``T = clip(T + f, -1, 1)``, ``A[f != 0] = 0``.

    A trit moves at most one step. Mutates ``packed`` and ``votes``.

    Args:
        packed: weight in the backend's layout.
        votes: int8, the backend's layout.
        threshold: ``theta``, 1..127.
        leak: units by which every accumulator then moves towards zero; 0 for none.
        shape: logical shape of the weight.

    Returns:
        int64 scalar: trits that changed.
    """
    matrix = votes.view(shape.out_features, shape.in_features)
    flips = torch.zeros((), dtype=torch.int64, device=packed.device)
    rows_a_tile = max(1, _TILE // max(1, shape.in_features))
    for start in range(0, shape.out_features, rows_a_tile):
        tile = slice(start, min(start + rows_a_tile, shape.out_features))
        crossed = _crossings(matrix[tile], threshold)
        if bool(crossed.any()):
            before = unpack_trits(packed[tile], shape.in_features)
            after = (before + crossed).clamp_(-1, 1)
            flips += (after != before).sum()
            packed[tile] = pack_trits(after)
            matrix[tile].masked_fill_(crossed != 0, 0)
        _leak_(matrix[tile], leak)
    return flips


def apply_exponent_votes(
    exponent: Tensor, exponent_votes: Tensor, origin: Tensor, threshold: int, band: int, leak: int
) -> Tensor:
    """``up = [B >= theta] - [B <= -theta]``, ``E = clip(E + up, E0 - band, E0 + band)``, ``B = B - theta * up``.

    Mutates ``exponent`` and ``exponent_votes``. ``E`` also stays within -126..127, where ``2**E`` is a normal float32.

    Args:
        exponent: int8 ``[N, J]``.
        exponent_votes: int8 ``[N, J]``.
        origin: int8, broadcastable to ``[N, J]``: the exponents at birth, ``E0``.
        threshold: ``theta``, 1..127.
        band: how far an exponent may move from its origin.
        leak: units by which every accumulator then moves towards zero; 0 for none.

    Returns:
        int64 scalar: exponents that changed.
    """
    up = _crossings(exponent_votes, threshold)
    centre = origin.to(torch.int16)
    wanted = (exponent.to(torch.int16) + up).maximum(centre - band).minimum(centre + band).clamp_(*EXPONENT_RANGE)
    moved = (wanted != exponent).sum()
    exponent.copy_(wanted)
    exponent_votes.copy_(exponent_votes.to(torch.int16) - threshold * up.to(torch.int16))
    _leak_(exponent_votes, leak)
    return moved
