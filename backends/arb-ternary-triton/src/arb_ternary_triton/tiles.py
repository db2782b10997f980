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
class ProductTile:
    """Tile of a product, or of a gradient that becomes votes.

    Attributes:
        rows: rows of activations; of votes, those that are summed at a time.
        outputs: rows of the weight.
        blocks: blocks of 128 columns.
        split: programs that share a sum.
        warps: warps per program.
        stages: pipeline stages.
    """

    rows: int
    outputs: int
    blocks: int
    split: int = 1
    warps: int = 4
    stages: int = 3


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


def _tile(entry: Entry, programs: int, steps: int) -> ProductTile:
    """Return an entry's tile, with sums of ``steps`` steps shared to fill the GPU."""
    split = _shared(entry, programs, steps)
    return ProductTile(entry.rows, entry.outputs, entry.blocks, split, entry.warps, entry.stages)


def choose_row(outputs: int, columns: int, integer: bool, device: torch.device) -> ProductTile:
    """Choose the tile of ``linear`` with one row."""
    blocks = cdiv(columns, BLOCK)
    if INTERPRETED:
        size = min(power_of_two_up(blocks), 32)
        return ProductTile(1, min(power_of_two_up(outputs), 64), size, 2 if blocks > size else 1)
    kind = ("row", "int8" if integer else "float")
    entry = chosen_entry(kind, 1, outputs, columns, device)
    entry = evolve(entry, blocks=min(entry.blocks, power_of_two_up(blocks)))
    return _tile(entry, cdiv(outputs, entry.outputs), cdiv(blocks, entry.blocks))


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
    return _tile(entry, programs, cdiv(blocks, entry.blocks))


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
    return _tile(entry, programs, cdiv(outputs, entry.outputs))


def choose_votes(
    terms: int,
    outputs: int,
    columns: int,
    dtype: torch.dtype,
    by_shifts: bool,
    device: torch.device,
) -> ProductTile:
    """Choose the tile of votes cast from a product over ``terms`` rows."""
    if INTERPRETED:
        blocks = min(_whole_blocks(columns), 512) // BLOCK
        return ProductTile(max(32, _bounded(terms)), _bounded(outputs), blocks)
    kind = ("votes", operands_of(dtype, shifts=by_shifts))
    return _tile(chosen_entry(kind, terms, outputs, columns, device), 1, 1)


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
