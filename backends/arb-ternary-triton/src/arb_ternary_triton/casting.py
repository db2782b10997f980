"""Casting votes: the gradient's tile goes from registers into the accumulators.

Meaning and signatures are those of ``arb_ternary.backends.reference_votes`` and
``reference_scaled_votes``.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from arb_ternary.backends.reference_votes import looked_up_rows
from arb_ternary.backends.vote_state import VoteLimits, VoteState
from arb_ternary.counters.hashing import USE_EXPONENT_ROUNDING, USE_VOTE_ROUNDING
from arb_ternary_triton.arguments import check_float, check_mutable, check_packed, check_readable
from arb_ternary_triton.kernels.casting import (
    lookup_votes_kernel,
    product_votes_kernel,
    settle_correlation_kernel,
    settle_exponents_kernel,
    settle_sums_kernel,
)
from arb_ternary_triton.launch import INTERPRETED, cdiv, launch, power_of_two_up
from arb_ternary_triton.layout import vote_size
from arb_ternary_triton.noise import hash_keys
from arb_ternary_triton.tiles import Tile, choose_votes, elementwise

#: Longest sum of products of two int8 that fits in 32 bits.
_INT32_TERMS: Final = (2**31 - 1) // 127**2
#: Kinds of votes, as kernels know them.
_SIGNS = 0
_FACTORS = 1
_SHIFTS = 2


class _Cast:
    """One call: arguments checked, working memory, and what follows the tiles."""

    def __init__(
        self, scale: Tensor | None, state: VoteState, *, integer: bool, scaled: bool
    ) -> None:
        shape = state.shape
        rows = shape.out_features
        columns = shape.in_features
        self.shape = shape
        self.state = state
        self.integer = integer
        self.packed = check_packed(state.weight, shape)
        check_mutable(
            state.votes,
            "votes",
            torch.int8 if shape.vote_bits == 8 else torch.uint8,
            vote_size(shape),
        )
        check_mutable(state.stats, "stats", torch.float32, (1 + rows + columns,))
        if state.exponent_votes is not None:
            check_mutable(state.exponent_votes, "exponent_votes", torch.int8, (rows, shape.groups))
        self.scored = state.exponent_votes is not None or (
            state.correlation is not None and not scaled
        )
        self.scale = None if scale is None else check_readable(scale, "scale", torch.float32, ())
        self.limits = VoteLimits(0)
        self.words = None
        self.mode = _SIGNS
        self.magnitudes = self.vote_scale = None
        if scaled:
            self.limits = state.check_scaling(integer and scale is not None)
            self.words = state.draw()
            self.magnitudes, vote_scale = state.scaling
            self.mode = _SHIFTS if vote_scale.dtype is torch.int32 else _FACTORS
            check_mutable(self.magnitudes, "magnitudes", torch.float32, (rows + columns,))
            kinds = (torch.float32, torch.int32)
            self.vote_scale = check_readable(vote_scale, "vote_scale", kinds, (rows + columns,))

    def prepare(self, held: int, tile: Tile) -> tuple[int, int]:
        """Allocate for ``held`` rows that are voted on; returns the grid."""
        rows = cdiv(held, tile.rows)
        columns = cdiv(self.shape.in_features, tile.columns)
        self.held = held
        self.parts = (columns, rows)
        partial = columns * held + rows * self.shape.in_features
        device = self.packed.device
        self.bad = torch.zeros((), dtype=torch.int32, device=device)
        self.squares = torch.empty(partial, dtype=torch.float32, device=device)
        kind = torch.int64 if self.integer else torch.float32
        self.sizes = torch.empty(partial, dtype=kind, device=device) if self.mode else self.squares
        # Scores are summed over 128 columns, or over a group where that is smaller.
        group = self.shape.group_size if self.shape.groups > 1 else 0
        self.unit = min(group, 128) if group else 128
        self.units = cdiv(self.shape.in_features, self.unit)
        self.units_per_group = group // self.unit
        size = (held, self.units) if self.scored else (1, 1)
        self.score = torch.empty(size, dtype=torch.int32, device=device)
        return rows, columns

    def _keys(self, use: int, count: int) -> tuple[int, int, bool]:
        if self.words is None:
            return 0, 0, False
        seed, step, stream = self.words
        return hash_keys(seed, step, stream + use, count)

    def run(
        self,
        kernel: Any,
        grid: tuple[int, int],
        operands: tuple[Any, ...],
        sizes: tuple[int, ...],
        **facts: Any,
    ) -> None:
        """Start the kernel that casts; ``operands`` and ``sizes`` are its own, the rest is common
        to all.
        """
        shape = self.shape
        *keys, wide = self._keys(USE_VOTE_ROUNDING, shape.out_features * shape.in_features)
        launch(
            kernel,
            grid,
            *operands,
            self.squares if self.scale is None else self.scale,
            self.packed,
            self.state.votes,
            self.score,
            self.bad,
            self.squares,
            self.sizes,
            self.squares if self.vote_scale is None else self.vote_scale,
            *sizes,
            shape.out_features,
            shape.in_features,
            self.packed.shape[1],
            self.state.votes.shape[1],
            self.units,
            self.limits.vote_limit,
            self.limits.noise_shift,
            *keys,
            MODE=self.mode,
            INT8=self.integer,
            BITS=shape.vote_bits,
            LARGEST=shape.largest_vote,
            SMALLEST=-shape.largest_vote if self.mode else shape.smallest_vote,
            UNIT=self.unit if self.scored else 0,
            HAS_SCALE=self.scale is not None,
            WIDE=wide,
            **facts,
        )

    def settle(self, row_of: Tensor | None) -> None:
        """Add what the tiles left behind to statistics, magnitudes and the votes of the
        exponents.
        """
        shape = self.shape
        state = self.state
        state.stats[0] += self.bad
        self._settle_sums(self.squares, state.stats[1:], row_of, square=True)
        if self.magnitudes is not None:
            self._settle_sums(self.sizes, self.magnitudes, row_of, square=False)
        if state.exponent_votes is not None:
            *keys, wide = self._keys(USE_EXPONENT_ROUNDING, shape.out_features * shape.groups)
            chunk = _chunk(self.held * shape.groups)
            launch(
                settle_exponents_kernel,
                (cdiv(self.held * shape.groups, chunk),),
                self.score,
                state.exponent_votes,
                self.score if row_of is None else row_of,
                self.held,
                shape.groups,
                self.units,
                self.limits.exponent_shift,
                *keys,
                INDEXED=row_of is not None,
                SCALED=self.mode != _SIGNS,
                WIDE=wide,
                UNITS_PER_GROUP=self.units_per_group,
                CHUNK=chunk,
            )

    def _settle_sums(
        self, part: Tensor, target: Tensor, row_of: Tensor | None, *, square: bool
    ) -> None:
        longest = max(self.held, self.shape.in_features)
        chunk = _chunk(longest)
        launch(
            settle_sums_kernel,
            (cdiv(longest, chunk), 2),
            part,
            target,
            part if self.scale is None else self.scale,
            part if row_of is None else row_of,
            self.held,
            self.shape.out_features,
            self.shape.in_features,
            *self.parts,
            INDEXED=row_of is not None,
            HAS_SCALE=self.scale is not None,
            SQUARE=square,
            CHUNK=chunk,
        )


def _chunk(count: int) -> int:
    return min(power_of_two_up(count), 1 << 16) if INTERPRETED else 256


def _cast_product(grad_MN: Tensor, x_MK: Tensor, cast: _Cast) -> None:
    shape = cast.shape
    terms = grad_MN.shape[0]
    rows = shape.out_features
    columns = shape.in_features
    if not (terms and rows and columns):
        return
    if cast.integer:
        grad = check_readable(grad_MN, "grad", torch.int8, (terms, rows)).t().contiguous()
        x = check_readable(x_MK, "x", torch.int8, (terms, columns)).t().contiguous()
    else:
        grad, x = _float_operands(grad_MN, x_MK, (terms, rows), (terms, columns))
    tile = choose_votes(terms, rows, columns, grad.dtype, cast.mode == _SHIFTS, cast.packed.device)
    grid = cast.prepare(rows, Tile(tile.outputs, tile.columns))
    cast.run(
        product_votes_kernel,
        grid,
        (grad, x),
        (terms,),
        LONG=cast.integer and terms > _INT32_TERMS,
        ROWS=tile.outputs,
        COLUMNS=tile.columns,
        TERMS=tile.terms,
        warps=tile.warps,
        stages=tile.stages,
    )
    cast.settle(None)


def _float_operands(
    grad_MN: Tensor, x_MK: Tensor, grad_size: tuple[int, int], x_size: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Operands in the gradient's dtype; integers, which come with a gradient in float, are exact in
    bfloat16.
    """
    grad = check_float(
        grad_MN if grad_MN.is_floating_point() else grad_MN.to(torch.bfloat16), "grad", grad_size
    )
    return grad, check_float(x_MK.to(grad.dtype), "x", x_size)


def _cast_lookup(ids_M: Tensor, grad_MK: Tensor, cast: _Cast) -> None:
    shape = cast.shape
    correlation = cast.state.correlation
    steps = cast.state.steps
    terms = ids_M.numel()
    columns = shape.in_features
    ids = check_readable(ids_M, "ids", torch.int64, (terms,))
    size = (terms, columns)
    grad = (
        check_readable(grad_MK, "grad", torch.int8, size)
        if cast.integer
        else check_float(grad_MK, "grad", size)
    )
    if not (terms and columns):
        return
    distinct, order, starts, present_N = looked_up_rows(ids, shape.out_features)
    held = distinct.numel()
    tile = elementwise(held, columns)
    grid = cast.prepare(held, tile)
    cast.run(
        lookup_votes_kernel,
        grid,
        (grad, order, starts, distinct),
        (held,),
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        warps=tile.warps,
    )
    cast.settle(distinct)
    if correlation is not None and steps is not None and not cast.mode:
        check_mutable(correlation, "correlation", torch.int16, (shape.out_features, shape.groups))
        check_mutable(steps, "steps", torch.int32, (shape.out_features, shape.groups))
        before = steps.clone()
        chunk = _chunk(held * shape.groups)
        launch(
            settle_correlation_kernel,
            (cdiv(held * shape.groups, chunk),),
            cast.score,
            correlation,
            steps,
            distinct,
            held,
            shape.groups,
            cast.units,
            UNITS_PER_GROUP=cast.units_per_group,
            CHUNK=chunk,
        )
        # Rows that were not looked up have a score of 0, and no update to count.
        steps.copy_(torch.where(present_N[:, None], steps, before))


def _cast(
    grad_MN: Tensor, x_MK: Tensor, scale: Tensor | None, state: VoteState, scaled: bool
) -> None:
    integer = grad_MN.dtype is torch.int8 and x_MK.dtype is torch.int8
    _cast_product(grad_MN, x_MK, _Cast(scale, state, integer=integer, scaled=scaled))


def cast_votes(grad_MN: Tensor, x_MK: Tensor, scale: Tensor | None, state: VoteState) -> None:
    """Cast one micro-batch's votes ``sign(grad_y.T @ x)``; mutates ``votes``, ``exponent_votes``
    and ``stats``.
    """
    _cast(grad_MN, x_MK, scale, state, False)


def cast_scaled_votes(
    grad_MN: Tensor, x_MK: Tensor, scale: Tensor | None, state: VoteState
) -> None:
    """Cast one micro-batch's scaled votes; mutates ``votes``, ``exponent_votes``, ``stats`` and
    ``magnitudes``.
    """
    _cast(grad_MN, x_MK, scale, state, True)


def embedding_votes(ids_M: Tensor, grad_MK: Tensor, scale: Tensor | None, state: VoteState) -> None:
    """Votes of the looked-up rows; duplicates are summed before the sign, untouched rows stay
    bit-identical.
    """
    _cast_lookup(
        ids_M, grad_MK, _Cast(scale, state, integer=grad_MK.dtype is torch.int8, scaled=False)
    )


def embedding_scaled_votes(
    ids_M: Tensor, grad_MK: Tensor, scale: Tensor | None, state: VoteState
) -> None:
    """Scaled votes of the looked-up rows by the rule of :func:`cast_scaled_votes`."""
    _cast_lookup(
        ids_M, grad_MK, _Cast(scale, state, integer=grad_MK.dtype is torch.int8, scaled=True)
    )
