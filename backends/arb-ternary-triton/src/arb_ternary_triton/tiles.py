"""Tile sizes: the part of an operand that a program takes, and the programs that share a sum."""

from __future__ import annotations

import torch
from attrs import evolve, frozen

from arb_ternary_triton.arguments import BLOCK
from arb_ternary_triton.choice import chosen_entry
from arb_ternary_triton.entries import Entry, operands_of
from arb_ternary_triton.launch import INTERPRETED, cdiv, power_of_two_up


@frozen
class Tile:
    """Rows and columns of a tile; columns are whole blocks of 128."""

    rows: int
    columns: int
    warps: int = 4


@frozen
class RowTile:
    """Tile of a product with one row of activations.

    Attributes:
        outputs: rows of the weight.
        blocks: blocks of 128 columns at a time.
        split: programs that share a sum.
        warps: warps per program.
        stages: pipeline stages.
    """

    outputs: int
    blocks: int
    split: int
    warps: int = 4
    stages: int = 3


@frozen
class ProductTile:
    """Tile of a product on tensor cores.

    Attributes:
        rows: rows of activations.
        outputs: rows of the weight.
        blocks: blocks of 128 columns.
        split: programs that share a sum.
        warps: warps per program.
        stages: pipeline stages.
    """

    rows: int
    outputs: int
    blocks: int
    split: int
    warps: int = 4
    stages: int = 3


@frozen
class VoteTile:
    """Tile of a gradient that becomes votes.

    Attributes:
        outputs: rows of the weight.
        columns: columns of the weight.
        terms: rows of activations at a time.
        warps: warps per program.
        stages: pipeline stages.
    """

    outputs: int
    columns: int
    terms: int
    warps: int = 8
    stages: int = 2


def elementwise(rows: int, columns: int, warps: int = 4) -> Tile:
    """Return the tile of kernels that visit every element of a weight once.

    A warp alone needs no shared memory to find out whether its tile has anything to do.
    """
    if INTERPRETED:
        # A program costs the same, whatever its size.
        return Tile(min(power_of_two_up(rows), 256), min(_whole_blocks(columns), 4096))
    return Tile(8 if warps == 1 else 16, 256, warps)


def _shared(entry: Entry, programs: int, steps: int) -> int:
    """Return how many programs share a sum of ``steps`` steps to fill the GPU.

    Each takes at least 4 steps, and at most 16 programs share a sum.
    """
    wanted = cdiv(entry.fill, max(1, programs))
    return max(1, min(wanted, steps // 4, 16))


def choose_row(outputs: int, columns: int, integer: bool, device: torch.device) -> RowTile:
    """Choose the tile of ``linear`` with one row."""
    blocks = cdiv(columns, BLOCK)
    if INTERPRETED:
        size = min(power_of_two_up(blocks), 32)
        return RowTile(min(power_of_two_up(outputs), 64), size, 2 if blocks > size else 1)
    kind = ("row", "int8" if integer else "float")
    entry = chosen_entry(kind, 1, outputs, columns, device)
    blocks_per_step = min(entry.blocks, power_of_two_up(blocks))
    split = _shared(entry, cdiv(outputs, entry.outputs), cdiv(blocks, blocks_per_step))
    return RowTile(entry.outputs, blocks_per_step, split, entry.warps, entry.stages)


def choose_linear(
    rows: int, outputs: int, columns: int, dtype: torch.dtype, wide: bool, device: torch.device
) -> ProductTile:
    """Choose the tile of ``linear``, which sums over ``columns``; ``wide`` means in 64 bits."""
    blocks = cdiv(columns, BLOCK)
    if INTERPRETED:
        size = min(power_of_two_up(blocks), 16)
        return ProductTile(_bounded(rows), _bounded(outputs), size, 2 if blocks > size else 1)
    kind = ("linear", operands_of(dtype, wide=wide))
    entry = _registers(chosen_entry(kind, rows, outputs, columns, device), outputs, columns)
    programs = cdiv(rows, entry.rows) * cdiv(outputs, entry.outputs)
    split = _shared(entry, programs, cdiv(blocks, entry.blocks))
    return ProductTile(entry.rows, entry.outputs, entry.blocks, split, entry.warps, entry.stages)


def choose_grad_input(
    rows: int, outputs: int, columns: int, dtype: torch.dtype, wide: bool, device: torch.device
) -> ProductTile:
    """Choose the tile of ``linear_grad_input``, which sums over ``outputs``."""
    blocks = cdiv(columns, BLOCK)
    if INTERPRETED:
        size = max(32, _bounded(outputs))
        some_blocks = min(power_of_two_up(blocks), 16)
        return ProductTile(_bounded(rows), size, some_blocks, 2 if outputs > size else 1)
    kind = ("grad_input", operands_of(dtype, wide=wide))
    entry = _registers(chosen_entry(kind, rows, outputs, columns, device), outputs, columns)
    programs = cdiv(rows, entry.rows) * 4 * cdiv(blocks, entry.blocks)
    split = _shared(entry, programs, cdiv(outputs, entry.outputs))
    return ProductTile(entry.rows, entry.outputs, entry.blocks, split, entry.warps, entry.stages)


def choose_votes(
    terms: int,
    outputs: int,
    columns: int,
    dtype: torch.dtype,
    by_shifts: bool,
    device: torch.device,
) -> VoteTile:
    """Choose the tile of votes cast from a product over ``terms`` rows."""
    if INTERPRETED:
        columns_per_tile = min(_whole_blocks(columns), 512)
        return VoteTile(_bounded(outputs), columns_per_tile, max(32, _bounded(terms)))
    kind = ("votes", operands_of(dtype, shifts=by_shifts))
    entry = chosen_entry(kind, terms, outputs, columns, device)
    columns_per_tile = BLOCK * entry.blocks
    return VoteTile(entry.outputs, columns_per_tile, entry.rows, entry.warps, entry.stages)


def _registers(entry: Entry, outputs: int, columns: int) -> Entry:
    """Return an entry with fewer rows if operands are not aligned, which takes registers."""
    if outputs % 16 == 0 and columns % 16 == 0:
        return entry
    return evolve(entry, rows=min(entry.rows, 64))


def _whole_blocks(columns: int) -> int:
    """Return the power of two that holds the columns, at least one block."""
    return max(BLOCK, power_of_two_up(columns))


def _bounded(size: int) -> int:
    """Return a tile size for a small operand, at least 16 for tensor cores and at most 256."""
    return min(max(16, power_of_two_up(size)), 256)
