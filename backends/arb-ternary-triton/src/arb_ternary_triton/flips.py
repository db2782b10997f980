"""Apply votes: crossings of accumulators become flips of trits and steps of exponents."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

import torch
from attrs import frozen
from torch import Tensor

from arb_ternary.backends.arguments import check_groups, vote_dtype
from arb_ternary.backends.floors import renew_floors
from arb_ternary.backends.vote_state import VoteState
from arb_ternary.counters.hashing import USE_DECAY, HashKeys, hash_keys
from arb_ternary_triton.arguments import LANES, check_mutable, check_readable, packed_columns
from arb_ternary_triton.kernels.flips import (
    FIELDS,
    flip_exponents_kernel,
    flip_kernel,
    flip_together_kernel,
    move_together_kernel,
)
from arb_ternary_triton.launch import INTERPRETED, cdiv, instruction_set, launch, power_of_two_up
from arb_ternary_triton.layout import vote_size
from arb_ternary_triton.tiles import elementwise

_NO_KEYS: Final = HashKeys()


@frozen
class _Flip:
    """Checked arguments of a call that flips trits.

    Attributes:
        state: the weight and its accumulators.
        threshold: votes that flip a trit.
        leak: amount by which votes move towards zero.
        decay: 65536ths of a vote that decay takes.
        carry: whether a crossing takes the threshold off an accumulator instead of clearing it.
        keys: of the hash that rounds what decays.
    """

    state: VoteState
    threshold: int
    leak: int = 0
    decay: int = 0
    carry: bool = False
    keys: HashKeys = _NO_KEYS

    def __attrs_post_init__(self) -> None:
        state = self.state
        shape = state.shape
        check_groups(shape, LANES)
        size = (shape.out_features, packed_columns(shape.in_features))
        check_mutable(state.weight, "packed", torch.uint8, size)
        check_mutable(state.votes, "votes", vote_dtype(shape), vote_size(shape))

    @property
    def sizes(self) -> tuple[int, ...]:
        """The arguments of a kernel after its tensors."""
        state = self.state
        return (
            state.shape.out_features,
            state.shape.in_features,
            state.weight.shape[1],
            state.votes.shape[1],
            self.threshold,
            self.leak,
            self.decay,
            self.keys.first,
            self.keys.second,
            state.first_row,
        )

    @property
    def options(self) -> dict[str, int]:
        """The compile-time arguments of a kernel, without its tile."""
        return {
            "CARRY": self.carry,
            "LEAK": self.leak > 0,
            "DECAY": self.decay > 0,
            "BITS": self.state.shape.vote_bits,
            "WORDS": self.in_words,
            "WIDE": self.keys.wide,
            # The instructions that are used take factors below 2**16.
            "ISA": instruction_set(self.state.weight.device) if self.decay < 1 << 16 else 0,
        }

    @property
    def in_words(self) -> bool:
        """Whether accumulators can be read and written four at a time."""
        shape = self.state.shape
        whole = shape.vote_bits == 8 and shape.in_features % 4 == 0
        return whole and self.state.votes.data_ptr() % 4 == 0

    @property
    def warps(self) -> int:
        """Warps per program."""
        return 1 if self.in_words else 4

    @property
    def aligned(self) -> bool:
        """Whether addresses and widths are multiples of 16."""
        state = self.state
        numbers = (
            state.weight.data_ptr(),
            state.votes.data_ptr(),
            state.shape.in_features,
            state.weight.shape[1],
            state.votes.shape[1],
        )
        return all(number % 16 == 0 for number in numbers)

    def run(self) -> Tensor:
        """Flip, and return the number of changed trits, int64."""
        packed = self.state.weight
        rows, columns, *_ = self.sizes
        flips = torch.zeros((), dtype=torch.int64, device=packed.device)
        tile = elementwise(rows, columns, warps=self.warps)
        launch(
            flip_kernel,
            (cdiv(rows, tile.rows), cdiv(columns, tile.columns)),
            packed,
            self.state.votes,
            flips,
            *self.sizes,
            **self.options,
            ROWS=tile.rows,
            COLUMNS=tile.columns,
            warps=tile.warps,
        )
        return flips


def _scaled_flip(state: VoteState, threshold: int, decay: int, carry: bool) -> _Flip:
    keys = _NO_KEYS
    if decay:
        seed, step, stream = state.draw()
        shape = state.shape
        count = (state.first_row + shape.out_features) * shape.in_features
        keys = hash_keys(seed, step, stream + USE_DECAY, count)
    return _Flip(state, threshold, decay=decay, carry=carry, keys=keys)


def apply_votes(state: VoteState, threshold: int, leak: int) -> Tensor:
    """Turn crossings into flips and return the number of changed trits, int64.

    Mutates ``weight`` and ``votes``.
    """
    return _Flip(state, threshold, leak=leak).run()


def apply_scaled_votes(state: VoteState, threshold: int, decay: int, carry: bool) -> Tensor:
    """Flip trits with or without carry, then decay the votes by the counter hash.

    Mutates ``weight`` and ``votes``. Returns the number of changed trits, int64.
    """
    return _scaled_flip(state, threshold, decay, carry).run()


def _exponents_of(state: VoteState) -> tuple[Tensor, Tensor, Tensor]:
    """Return the checked exponents of a state, their votes, and where they began ``[N, J]``."""
    exponent = state.exponent
    size = tuple(exponent.shape)
    check_mutable(exponent, "exponent", torch.int8, size)
    check_mutable(state.learned, "exponent_votes", torch.int8, size)
    origin = check_readable(state.origin, "origin", torch.int8, tuple(state.origin.shape))
    return exponent, state.learned, origin.expand(size)


def _chunk(count: int) -> int:
    return min(power_of_two_up(count), 1 << 16) if INTERPRETED else 512


def apply_exponent_votes(state: VoteState, threshold: int, band: int, leak: int) -> Tensor:
    """Move exponents by one step within their band and return the number that changed, int64.

    Mutates the exponents and their votes.
    """
    exponent, exponent_votes, origin = _exponents_of(state)
    moves = torch.zeros((), dtype=torch.int64, device=exponent.device)
    count = exponent.numel()
    chunk = _chunk(count)
    launch(
        flip_exponents_kernel,
        (cdiv(count, chunk),),
        exponent,
        exponent_votes,
        origin,
        moves,
        count,
        exponent.shape[1],
        *origin.stride(),
        threshold,
        band,
        leak,
        CHUNK=chunk,
    )
    renew_floors(exponent)
    return moves


def apply_together(
    op: str, states: Sequence[VoteState], settings: Sequence[tuple[int, ...]]
) -> Tensor:
    """Make the calls of ``op`` with each state and its settings, in as few launches as possible.

    Returns:
        What the calls return, int64 ``[n]``.
    """
    calls = list(zip(states, settings, strict=True))
    changed = torch.zeros(len(calls), dtype=torch.int64, device=states[0].weight.device)
    if op == "apply_exponent_votes":
        return _move_together(states, settings, changed)
    if op == "apply_votes":
        flips = [_Flip(state, threshold, leak=leak) for state, (threshold, leak) in calls]
    else:
        flips = [
            _scaled_flip(state, threshold, decay, bool(carry))
            for state, (threshold, decay, carry) in calls
        ]
    alike: dict[tuple[Any, ...], list[int]] = {}
    for index, flip in enumerate(flips):
        alike.setdefault((*flip.options.items(), flip.aligned), []).append(index)
    for indices in alike.values():
        counts = _flip_together([flips[index] for index in indices])
        if len(alike) == 1:
            return counts
        place = torch.tensor(indices).to(changed.device, non_blocking=True)
        changed[place] = counts
    return changed


@lru_cache(maxsize=16)
def _weight_of(programs: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the weight of each program, int32, for weights with these numbers of programs."""
    weights = torch.arange(len(programs), dtype=torch.int32)
    return weights.repeat_interleave(torch.tensor(programs)).to(device)


def _table(records: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Return the table of arguments, int64 ``[weights, FIELDS]``."""
    fields = int(FIELDS.value)
    filled = [[*record, *([0] * (fields - len(record)))] for record in records]
    return torch.tensor(filled).to(device, non_blocking=True)


def _flip_together(flips: Sequence[_Flip]) -> Tensor:
    """Flip the trits of weights whose kernels have the same options; return counts ``[n]``."""
    device = flips[0].state.weight.device
    shapes = [flip.state.shape for flip in flips]
    rows = max(shape.out_features for shape in shapes)
    columns = max(shape.in_features for shape in shapes)
    tile = elementwise(rows, columns, warps=flips[0].warps)
    records: list[tuple[int, ...]] = []
    programs: list[int] = []
    for flip in flips:
        row_tiles = cdiv(flip.state.shape.out_features, tile.rows)
        column_tiles = cdiv(flip.state.shape.in_features, tile.columns)
        addresses = (flip.state.weight.data_ptr(), flip.state.votes.data_ptr())
        records.append((sum(programs), column_tiles, *addresses, *flip.sizes))
        programs.append(row_tiles * column_tiles)
    counts = torch.zeros(len(flips), dtype=torch.int64, device=device)
    launch(
        flip_together_kernel,
        (sum(programs),),
        _table(records, device),
        _weight_of(tuple(programs), device),
        counts,
        **flips[0].options,
        ALIGNED=flips[0].aligned,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        warps=tile.warps,
    )
    return counts


def _move_together(
    states: Sequence[VoteState], settings: Sequence[tuple[int, ...]], moves: Tensor
) -> Tensor:
    """Move the exponents of several weights; return the counts ``moves [n]``."""
    device = moves.device
    chunk = _chunk(max(state.exponent.numel() for state in states))
    kept = []
    records: list[tuple[int, ...]] = []
    programs: list[int] = []
    for state, (threshold, band, leak) in zip(states, settings, strict=True):
        tensors = _exponents_of(state)
        exponent, _, origin = tensors
        kept.append(tensors)
        addresses = [tensor.data_ptr() for tensor in tensors]
        sizes = (exponent.numel(), exponent.shape[1], *origin.stride())
        records.append((sum(programs), *addresses, *sizes, threshold, band, leak))
        programs.append(cdiv(exponent.numel(), chunk))
    launch(
        move_together_kernel,
        (sum(programs),),
        _table(records, device),
        _weight_of(tuple(programs), device),
        moves,
        CHUNK=chunk,
    )
    for exponent, *_ in kept:
        renew_floors(exponent)
    return moves
