"""Cast votes: the tile of the gradient goes from registers into the accumulators.

Meaning and signatures are those of ``arb_ternary.backends.reference_votes`` and
``reference_scaled_votes``.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from arb_ternary.backends.arguments import vote_dtype
from arb_ternary.backends.reference_votes import looked_up_rows
from arb_ternary.backends.vote_state import VoteLimits, VoteState
from arb_ternary.counters.hashing import (
    USE_EXPONENT_ROUNDING,
    USE_VOTE_ROUNDING,
    HashKeys,
    hash_keys,
)
from arb_ternary_triton.arguments import (
    BLOCK,
    check_float,
    check_mutable,
    check_packed,
    check_readable,
)
from arb_ternary_triton.kernels.casting import (
    lookup_votes_kernel,
    product_votes_kernel,
    settle_correlation_kernel,
    settle_kernel,
)
from arb_ternary_triton.launch import INTERPRETED, cdiv, instruction_set, launch, power_of_two_up
from arb_ternary_triton.layout import vote_size
from arb_ternary_triton.tiles import Tile, choose_votes, elementwise

#: Longest sum of products of two int8 that fits in 32 bits.
_INT32_TERMS: Final = (2**31 - 1) // 127**2
#: Kinds of votes, as the kernels number them.
_SIGNS: Final = 0
_FACTORS: Final = 1
_SHIFTS: Final = 2


class _Cast:
    """One call that casts votes: its checked arguments and working memory."""

    def __init__(
        self, scale: Tensor | None, state: VoteState, *, integer: bool, scaled: bool
    ) -> None:
        shape = state.shape
        size = shape.out_features + shape.in_features
        self.shape = shape
        self.state = state
        self.integer = integer
        self.packed = check_packed(state.weight, shape)
        check_mutable(state.votes, "votes", vote_dtype(shape), vote_size(shape))
        check_mutable(state.stats, "stats", torch.float32, (1 + size,))
        if state.exponent_votes is not None:
            groups = (shape.out_features, shape.groups)
            check_mutable(state.exponent_votes, "exponent_votes", torch.int8, groups)
        correlated = state.correlation is not None and not scaled
        self.scored = state.exponent_votes is not None or correlated
        self.scale = None if scale is None else check_readable(scale, "scale", torch.float32, ())

        self.limits = VoteLimits(0)
        self.words = None
        self.mode = _SIGNS
        self.magnitudes = None
        self.vote_scale = None
        if scaled:
            self.limits = state.check_scaling(integer and scale is not None)
            self.words = state.draw()
            self.magnitudes, vote_scale = state.scaling
            self.mode = _SHIFTS if vote_scale.dtype is torch.int32 else _FACTORS
            check_mutable(self.magnitudes, "magnitudes", torch.float32, (size,))
            dtypes = (torch.float32, torch.int32)
            self.vote_scale = check_readable(vote_scale, "vote_scale", dtypes, (size,))

    def prepare(self, voted_rows: int, tile: Tile) -> tuple[int, int]:
        """Allocate working memory for the rows that are voted on; return the grid."""
        rows = cdiv(voted_rows, tile.rows)
        columns = cdiv(self.shape.in_features, tile.columns)
        self.voted_rows = voted_rows
        self.row_parts = columns
        self.column_parts = rows

        # Scores are summed over 128 columns, or over a group if that is smaller.
        group = self.shape.group_size if self.shape.groups > 1 else 0
        self.unit = min(group, 128) if group else 128
        self.units = cdiv(self.shape.in_features, self.unit)
        self.units_per_group = group // self.unit

        device = self.packed.device
        partial = columns * voted_rows + rows * self.shape.in_features
        self.bad = torch.zeros((), dtype=torch.int32, device=device)
        self.squares = torch.empty(partial, dtype=torch.float32, device=device)
        self.sizes = self.squares
        if self.mode != _SIGNS:
            dtype = torch.int64 if self.integer else torch.float32
            self.sizes = torch.empty(partial, dtype=dtype, device=device)
        scores = (voted_rows, self.units) if self.scored else (1, 1)
        self.score = torch.empty(scores, dtype=torch.int32, device=device)
        return rows, columns

    def _keys(self, use: int, count: int) -> HashKeys:
        if self.words is None:
            return HashKeys()
        seed, step, stream = self.words
        return hash_keys(seed, step, stream + use, count)

    def run(
        self,
        kernel: Any,
        grid: tuple[int, int],
        operands: tuple[Any, ...],
        sizes: tuple[int, ...],
        largest: int,
        **constants: Any,
    ) -> None:
        """Launch a kernel that casts.

        Args:
            kernel: one of the two kernels that cast votes.
            grid: the grid that :meth:`prepare` returned.
            operands: tensors of this kernel alone.
            sizes: sizes of this kernel alone.
            largest: largest absolute value of an integer gradient.
            constants: compile-time constants and options of this kernel alone.
        """
        shape = self.shape
        votes = self.state.votes
        in_words = shape.vote_bits == 8 and shape.in_features % 4 == 0
        keys = self._keys(USE_VOTE_ROUNDING, shape.out_features * shape.in_features)
        smallest = -shape.largest_vote if self.mode else shape.smallest_vote
        longest = max(constants["ROWS"], constants["COLUMNS"])
        # What a product sums in 64 bits is not read in 32.
        short = self.integer and not constants.get("LONG") and largest * longest < 1 << 32
        launch(
            kernel,
            grid,
            *operands,
            self.squares if self.scale is None else self.scale,
            self.packed,
            votes,
            self.score,
            self.bad,
            self.squares,
            self.sizes,
            self.squares if self.vote_scale is None else self.vote_scale,
            *sizes,
            shape.out_features,
            shape.in_features,
            self.packed.shape[1],
            votes.shape[1],
            self.units,
            self.limits.vote_limit,
            self.limits.noise_shift,
            keys.first,
            keys.second,
            MODE=self.mode,
            INT8=self.integer,
            BITS=shape.vote_bits,
            LARGEST=shape.largest_vote,
            SMALLEST=smallest,
            UNIT=self.unit if self.scored else 0,
            HAS_SCALE=self.scale is not None,
            WIDE=keys.wide,
            WORDS=in_words and votes.data_ptr() % 4 == 0,
            SHORT=short,
            ISA=instruction_set(votes.device),
            **constants,
        )

    def settle(self, row_of: Tensor | None) -> None:
        """Add the tiles' partial sums to statistics, magnitudes and exponent votes."""
        shape = self.shape
        state = self.state
        scaled = self.magnitudes is not None
        learned = state.exponent_votes
        longest = max(self.voted_rows, shape.in_features)
        if learned is not None:
            longest = max(longest, self.voted_rows * shape.groups)
        chunk = _chunk(longest)
        keys = self._keys(USE_EXPONENT_ROUNDING, shape.out_features * shape.groups)
        launch(
            settle_kernel,
            (cdiv(longest, chunk), 2 + 2 * scaled + (learned is not None)),
            self.squares,
            state.stats,
            self.sizes,
            state.stats if self.magnitudes is None else self.magnitudes,
            self.score,
            self.score if learned is None else learned,
            self.bad,
            self.squares if self.scale is None else self.scale,
            self.score if row_of is None else row_of,
            self.voted_rows,
            shape.out_features,
            shape.in_features,
            self.row_parts,
            self.column_parts,
            shape.groups,
            self.units,
            self.limits.exponent_shift,
            keys.first,
            keys.second,
            INDEXED=row_of is not None,
            HAS_SCALE=self.scale is not None,
            SCALED=scaled,
            EXPONENTS=learned is not None,
            WIDE=keys.wide,
            UNITS_PER_GROUP=self.units_per_group,
            CHUNK=chunk,
        )

    def settle_correlation(
        self, correlation: Tensor, steps: Tensor, row_of: Tensor, present_N: Tensor
    ) -> None:
        """Add the scores of looked-up rows to the correlation, and count the update."""
        shape = self.shape
        size = (shape.out_features, shape.groups)
        check_mutable(correlation, "correlation", torch.int16, size)
        check_mutable(steps, "steps", torch.int32, size)
        before = steps.clone()
        count = self.voted_rows * shape.groups
        chunk = _chunk(count)
        launch(
            settle_correlation_kernel,
            (cdiv(count, chunk),),
            self.score,
            correlation,
            steps,
            row_of,
            self.voted_rows,
            shape.groups,
            self.units,
            UNITS_PER_GROUP=self.units_per_group,
            CHUNK=chunk,
        )
        # Rows that were not looked up have a score of 0, and no update to count.
        steps.copy_(torch.where(present_N[:, None], steps, before))


def _chunk(count: int) -> int:
    return min(power_of_two_up(count), 1 << 16) if INTERPRETED else 256


def _cast_product(
    grad_MN: Tensor, x_MK: Tensor, scale: Tensor | None, state: VoteState, *, scaled: bool
) -> None:
    integer = grad_MN.dtype is torch.int8 and x_MK.dtype is torch.int8
    cast = _Cast(scale, state, integer=integer, scaled=scaled)
    shape = cast.shape
    terms = grad_MN.shape[0]
    rows = shape.out_features
    columns = shape.in_features
    if not (terms and rows and columns):
        return
    if integer:
        grad = check_readable(grad_MN, "grad", torch.int8, (terms, rows)).t().contiguous()
        x = check_readable(x_MK, "x", torch.int8, (terms, columns)).t().contiguous()
    else:
        # Integer gradients with float activations are exact in bfloat16.
        wide = grad_MN if grad_MN.is_floating_point() else grad_MN.to(torch.bfloat16)
        grad = check_float(wide, "grad", (terms, rows))
        x = check_float(x_MK.to(grad.dtype), "x", (terms, columns))

    shifts = cast.mode == _SHIFTS
    tile = choose_votes(terms, rows, columns, grad.dtype, shifts, cast.packed.device)
    # Narrow accumulators are taken out of bytes and put back, which takes registers.
    warps = tile.warps if shape.vote_bits == 8 else max(tile.warps, 8)
    tile_columns = BLOCK * tile.blocks
    grid = cast.prepare(rows, Tile(tile.outputs, tile_columns))
    cast.run(
        product_votes_kernel,
        grid,
        (grad, x),
        (terms,),
        terms * 127**2,
        LONG=integer and terms > _INT32_TERMS,
        ROWS=tile.outputs,
        COLUMNS=tile_columns,
        TERMS=tile.rows,
        warps=warps,
        stages=tile.stages,
    )
    cast.settle(None)


def _cast_lookup(
    ids_M: Tensor, grad_MK: Tensor, scale: Tensor | None, state: VoteState, *, scaled: bool
) -> None:
    integer = grad_MK.dtype is torch.int8
    cast = _Cast(scale, state, integer=integer, scaled=scaled)
    shape = cast.shape
    terms = ids_M.numel()
    columns = shape.in_features
    ids = check_readable(ids_M, "ids", torch.int64, (terms,))
    if integer:
        grad = check_readable(grad_MK, "grad", torch.int8, (terms, columns))
    else:
        grad = check_float(grad_MK, "grad", (terms, columns))
    if not (terms and columns):
        return

    distinct, order, starts, present_N = looked_up_rows(ids, shape.out_features)
    count = distinct.numel()
    tile = elementwise(count, columns)
    grid = cast.prepare(count, tile)
    cast.run(
        lookup_votes_kernel,
        grid,
        (grad, order, starts, distinct),
        (count,),
        terms * 128,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        warps=tile.warps,
    )
    cast.settle(distinct)
    if state.correlation is not None and state.steps is not None and not scaled:
        cast.settle_correlation(state.correlation, state.steps, distinct, present_N)


def cast_votes(grad_MN: Tensor, x_MK: Tensor, scale: Tensor | None, state: VoteState) -> None:
    """Cast one micro-batch's votes ``sign(grad_y.T @ x)``.

    Mutates ``votes``, ``exponent_votes`` and ``stats``.
    """
    _cast_product(grad_MN, x_MK, scale, state, scaled=False)


def cast_scaled_votes(
    grad_MN: Tensor, x_MK: Tensor, scale: Tensor | None, state: VoteState
) -> None:
    """Cast one micro-batch's scaled votes.

    Mutates ``votes``, ``exponent_votes``, ``stats`` and ``magnitudes``.
    """
    _cast_product(grad_MN, x_MK, scale, state, scaled=True)


def embedding_votes(ids_M: Tensor, grad_MK: Tensor, scale: Tensor | None, state: VoteState) -> None:
    """Cast the sign votes of the looked-up rows.

    Duplicates are summed before the sign. Other rows stay bit-identical.
    """
    _cast_lookup(ids_M, grad_MK, scale, state, scaled=False)


def embedding_scaled_votes(
    ids_M: Tensor, grad_MK: Tensor, scale: Tensor | None, state: VoteState
) -> None:
    """Cast the scaled votes of the looked-up rows by the rule of :func:`cast_scaled_votes`."""
    _cast_lookup(ids_M, grad_MK, scale, state, scaled=True)
