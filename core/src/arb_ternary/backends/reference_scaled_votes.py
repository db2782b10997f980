"""Scaled votes in the torch backend: gradients, normalised by row and column, rounded at random.

A vote is ``v = floor(clip(g * r * c) + u)`` with a factor per row, a factor per column and ``u``
from the counter hash. In integer mode the factors are powers of two, and the vote is a stochastic
right shift of an integer gradient. As with sign votes, ``v`` is subtracted from the accumulators: a
positive gradient moves a trit towards -1.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from arb_ternary.backends.layout import opened, unpack_trits
from arb_ternary.backends.reference_votes import (
    flip_,
    gradient_tiles,
    group_score,
    may_be,
    summed_rows,
)
from arb_ternary.backends.vote_state import VoteState
from arb_ternary.counters.hashing import (
    USE_DECAY,
    USE_EXPONENT_ROUNDING,
    USE_VOTE_ROUNDING,
    counter_hash,
    counter_hash_rows,
    uniform_,
)

#: Largest right and left shift of a gradient in integer mode.
_MAX_SHIFT = 31
_MAX_LEFT_SHIFT = 16
#: Elements whose 64-bit intermediates are in memory at a time, so that they stay in the cache.
_SHIFTED = 1 << 15


def _noise_(bits: Tensor, noise_shift: int) -> Tensor:
    """Return ``u`` of :func:`cast_scaled_votes` in float32, from hash bits that are overwritten."""
    if noise_shift == 0:
        return uniform_(bits)
    width = 1 << (24 - noise_shift)
    bits.bitwise_right_shift_(8 + noise_shift).bitwise_and_(width - 1)
    bits.add_(((1 << 24) - width) >> 1)
    return bits.to(torch.float32).mul_(2.0**-24)


def _integer_votes(
    g_nK: Tensor, row_n: Tensor, column_K: Tensor, power: Tensor | int, limit: int, bits: Tensor
) -> Tensor:
    """Return votes int32 ``[n, K]``: the gradient, shifted right by ``row + column - power``.

    The shift rounds stochastically, with the ``bits`` of the counter hash. The unit of the gradient
    (int32 or int64) is ``2**power``.
    """
    votes = torch.empty_like(g_nK, dtype=torch.int32)
    offset_K = column_K.to(torch.int64) - power
    rows = max(1, _SHIFTED // max(1, g_nK.shape[1]))
    for start in range(0, g_nK.shape[0], rows):
        some = slice(start, start + rows)
        shift = row_n[some].to(torch.int64).unsqueeze(1) + offset_K
        right = shift.clamp(0, _MAX_SHIFT)
        left = shift.neg_().clamp_(0, _MAX_LEFT_SHIFT)
        g = g_nK[some].to(torch.int64) << left
        bound = (limit << right) >> 8
        noise = bits[some] & ((1 << right) - 1)
        votes[some] = g.clamp_(-bound, bound).add_(noise) >> right
    return votes


class _Cast:
    """One cast of scaled votes: its state, and how gradients become votes."""

    def __init__(self, gradient: Tensor, scale: Tensor | None, state: VoteState) -> None:
        self.scale = scale
        self.state = state
        self.shape = state.shape
        self.magnitudes, vote_scale = state.scaling
        self.limits = state.check_scaling(scale is not None and gradient.dtype == torch.int8)
        self.words = state.draw()
        self.shifts = vote_scale.dtype == torch.int32
        #: The exponent of the scale, which is a power of two.
        self.power: Tensor | int = 0
        if self.shifts and scale is not None:
            self.power = torch.frexp(scale).exponent - 1
        rows = self.shape.out_features
        self.row_N = vote_scale[:rows]
        self.column_K = vote_scale[rows:]

    def cast_all_(self, gradients: Iterable[tuple[slice | Tensor, Tensor]]) -> None:
        """Cast the votes of the gradients of stretches of rows, and add their statistics."""
        total_K: Tensor | None = None
        for rows, gradient_nK in gradients:
            columns_K = self._cast_(rows, gradient_nK)
            total_K = columns_K if total_K is None else total_K.add_(columns_K)
        if total_K is not None:
            self.magnitudes[self.shape.out_features :] += _in_units(total_K, self.scale)

    def _cast_(self, rows: slice | Tensor, gradient_nK: Tensor) -> Tensor:
        """Cast the votes of one stretch; return the column sums of ``|g|`` of :func:`_measure`."""
        shape = self.shape
        stats = self.state.stats
        g_nK, sums = _examine(gradient_nK, stats)
        square = 1.0 if self.scale is None else self.scale.square()
        self.magnitudes[: shape.out_features][rows] += _in_units(sums.rows, self.scale)
        stats[1 : 1 + shape.out_features][rows] += sums.row_squares.mul_(square)
        stats[1 + shape.out_features :] += sums.column_squares.mul_(square)

        bits = self._bits(rows, shape.in_features, USE_VOTE_ROUNDING)
        v_nK = self._votes(g_nK, self.row_N[rows], sums.rows, bits)
        with opened(self.state, rows) as (packed, votes_nK, exponent_votes):
            if exponent_votes is not None:
                trits_nK = unpack_trits(packed, shape.in_features)
                score_nJ = group_score(v_nK.to(torch.int8) * trits_nK, shape)
                shift = self.limits.exponent_shift
                bits = self._bits(rows, shape.groups, USE_EXPONENT_ROUNDING)
                noise_nJ = bits & ((1 << shift) - 1)
                moved_nJ = (score_nJ.to(torch.int64) + noise_nJ) >> shift
                exponent_votes.copy_((exponent_votes - moved_nJ).clamp_(-127, 127))
            largest = shape.largest_vote
            torch.sub(votes_nK, v_nK, out=v_nK)
            votes_nK.copy_(v_nK.clamp_(-largest, largest))
        return sums.columns

    def _bits(self, rows: slice | Tensor, width: int, use: int) -> Tensor:
        """Return the hashes of some rows of a matrix of this width, int32 ``[n, width]``."""
        if isinstance(rows, slice):
            return _row_hashes(rows, width, self.words, use, self.magnitudes.device)
        seed, step, stream = self.words
        height = self.shape.out_features
        return counter_hash_rows(rows, width, seed, step, stream + use, rows=height)

    def _votes(self, g_nK: Tensor, row_n: Tensor, sizes_n: Tensor, bits: Tensor) -> Tensor:
        """Return the votes of gradient rows, whole numbers in int32 or float32.

        The gradient rows are overwritten.
        """
        if self.shifts:
            limit = self.limits.vote_limit
            return _integer_votes(g_nK, row_n, self.column_K, self.power, limit, bits)
        if not g_nK.is_floating_point() and self.scale is not None:
            g_nK = g_nK.to(torch.float32).mul_(self.scale)
            sizes_n = sizes_n * self.scale
        v_nK = g_nK.mul_(row_n.unsqueeze(1)).mul_(self.column_K)
        # If these bounds are finite, no product is NaN.
        largest_product = sizes_n.max() * row_n.abs().max()
        finite = torch.isfinite(largest_product) & torch.isfinite(self.column_K).all()
        if may_be(~finite):
            v_nK.nan_to_num_(0.0, torch.inf, -torch.inf)
        largest = self.limits.vote_limit / 256
        noise = _noise_(bits, self.limits.noise_shift)
        return v_nK.clamp_(-largest, largest).add_(noise).floor_()


def _row_hashes(
    rows: slice, width: int, words: tuple[int, int, int], use: int, device: torch.device
) -> Tensor:
    """Return the hashes of a stretch of rows of a matrix of this width, int32 ``[n, width]``."""
    seed, step, stream = words
    count = (rows.stop - rows.start) * width
    start = rows.start * width
    bits = counter_hash(count, seed, step, stream + use, start=start, device=device)
    return bits.view(rows.stop - rows.start, width)


class _Sums(NamedTuple):
    """Sums over a stretch of gradient rows.

    Attributes:
        rows: sums of ``|g|`` by row, float32, or int64 of integers.
        columns: sums of ``|g|`` by column.
        row_squares: sums of ``g**2`` by row, float32.
        column_squares: sums of ``g**2`` by column, float32.
    """

    rows: Tensor
    columns: Tensor
    row_squares: Tensor
    column_squares: Tensor


def _measure(g_nK: Tensor) -> _Sums:
    """Return the sums over gradient rows."""
    size = g_nK.abs()
    kind = torch.float32 if size.is_floating_point() else torch.int64
    rows = size.sum(dim=1, dtype=kind)
    columns = size.sum(dim=0, dtype=kind)
    squares = size.to(torch.float32).square_()
    return _Sums(rows, columns, squares.sum(dim=1), squares.sum(dim=0))


def _examine(g_nK: Tensor, stats: Tensor) -> tuple[Tensor, _Sums]:
    """Return gradient rows with NaN as 0, and their :func:`_measure`.

    Float rows become float32. NaN are counted in ``stats``.
    """
    if not g_nK.is_floating_point():
        return g_nK, _measure(g_nK)
    g = g_nK.to(torch.float32)
    measured = _measure(g)
    if may_be(~torch.isfinite(measured.rows).all()):
        stats[0] += torch.isnan(g).sum()
        g = g.nan_to_num(0.0)
        measured = _measure(g)
    return g, measured


def _in_units(sums: Tensor, scale: Tensor | None) -> Tensor:
    """Return sums of ``|g|`` in float32; sums of integers are rounded once, then scaled."""
    return sums if scale is None else sums.to(torch.float32).mul_(scale)


def cast_scaled_votes(
    grad_MN: Tensor, x_MK: Tensor, scale: Tensor | None, state: VoteState
) -> None:
    """Cast the scaled votes of one micro-batch.

    ``A = clip(A - v, -R, R)`` and ``B = clip(B - w, -127, 127)``. With ``g = grad_y.T @ x``, the
    numbers of :class:`~arb_ternary.backends.vote_state.VoteLimits`, ``L = vote_limit / 256``,
    ``row`` and ``column`` the two parts of ``vote_scale``, ``i = n * K + k`` and ``h`` the hash of
    ``i`` in the stream ``stream + USE_VOTE_ROUNDING``:

    * float mode: ``v = floor(clip((g * row[n]) * column[k], -L, L) + u * 2**-24)`` in float32; a
      product that is NaN counts as 0. An integer ``g`` is first converted and multiplied by
      ``scale``. With ``z = noise_shift``, ``u = ((2**24 - 2**(24 - z)) >> 1) + (h >> (8 + z))``:
      noise around one half, as wide as ``2**-z`` of a vote.
    * integer mode: ``s = row[n] + column[k] - log2(scale)``. For ``s >= 0``: ``s = min(s, 31)``,
      ``b = (vote_limit << s) >> 8``, ``v = (clip(g, -b, b) + (h & (2**s - 1))) >> s``. For ``s <
      0``: ``v = clip(g << min(-s, 16), -(vote_limit >> 8), vote_limit >> 8)``.

    ``w[n, j] = (score + (h' & (2**exponent_shift - 1))) >> exponent_shift`` with ``score`` the sum
    over the group of ``v * T`` and ``h'`` the hash of ``n * J + j`` in the stream ``stream +
    USE_EXPONENT_ROUNDING``. ``R`` is 127, 7 or 1 for votes of 8, 4 or 2 bits. Mutates ``votes``,
    ``exponent_votes`` (unless None), ``stats`` as sign votes do, and ``magnitudes``: row and column
    sums of ``|g|`` are added. The sums of an integer gradient are exact over the whole matrix,
    rounded once to float32 and multiplied by ``scale``.

    Args:
        grad_MN: float gradient (row scales of int8 activations already folded in), or int8 with
            ``scale``.
        x_MK: float activations, or int8; both int8 selects the exact integer product.
        scale: float32 scalar, the power of two of an int8 gradient.
        state: with float32 factors as ``vote_scale`` (float mode), or int32 shifts (integer mode,
            which needs int8 ``grad_MN`` and ``x_MK``, and ``noise_shift`` 0).
    """
    _Cast(grad_MN, scale, state).cast_all_(gradient_tiles(grad_MN, x_MK, state.shape))


def embedding_scaled_votes(
    ids_M: Tensor, grad_MK: Tensor, scale: Tensor | None, state: VoteState
) -> None:
    """Cast the scaled votes of the looked-up rows by the rule of :func:`cast_scaled_votes`.

    The gradients of duplicate ids are summed first. Other rows stay bit-identical and add nothing
    to ``stats`` and ``magnitudes``. The hash takes the index in the whole table. Mutates what
    :func:`cast_scaled_votes` mutates. ``ids_M`` are int64, the row of each gradient row; an int8
    gradient has its power of two in ``scale`` (float32 scalar) and is summed exactly.
    """
    if ids_M.numel():
        _Cast(grad_MK, scale, state).cast_all_([summed_rows(ids_M, grad_MK)])


def apply_scaled_votes(state: VoteState, threshold: int, decay: int, carry: bool) -> Tensor:
    """Turn crossings into flips, then let the accumulators decay.

    ``f = [A >= theta] - [A <= -theta]``, ``T' = clip(T + f, -1, 1)``. Without ``carry``, ``A[f !=
    0] = 0``. With it, ``A -= theta * f`` where the trit moved, and ``A = sign(A) * (theta // 2)``
    where it was at the rail. Then every accumulator loses a share, stochastically rounded: ``|A| -=
    (|A| * decay + (h & 0xFFFF)) >> 16`` with ``h`` the hash of ``(first_row + n) * K + k`` in the
    stream ``stream + USE_DECAY``; with ``decay`` 0 nothing is drawn. Mutates ``weight`` and
    ``votes``; returns the number of trits that changed (int64 scalar).

    Args:
        threshold: ``theta``, 1..R with ``R`` as in :func:`cast_scaled_votes`.
        decay: share of an accumulator in units of 2**-16, 0..65536.
        carry: whether the rest beyond the threshold is kept.
    """

    def decay_(rows: slice, votes_nK: Tensor) -> None:
        if decay and votes_nK.numel():
            place = slice(state.first_row + rows.start, state.first_row + rows.stop)
            bits = _row_hashes(place, votes_nK.shape[1], state.draw(), USE_DECAY, votes_nK.device)
            wide = votes_nK.to(torch.int32)
            loss = (wide.abs() * decay).add_(bits.bitwise_and_(0xFFFF))
            loss.bitwise_right_shift_(16).mul_(wide.sign())
            votes_nK.copy_(wide.sub_(loss))

    return flip_(state, threshold, carry, decay_)
