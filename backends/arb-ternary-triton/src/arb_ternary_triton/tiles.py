"""Tile sizes: how much of an operand one program takes, and how many programs share a sum."""

from __future__ import annotations

import torch
from attrs import frozen

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
    """For one row of activations: rows of the weight, blocks of 128 columns at a time, programs a
    sum.
    """

    outputs: int
    blocks: int
    split: int
    warps: int = 4
    stages: int = 3


@frozen
class ProductTile:
    """For tiles on tensor cores: rows of activations, rows of the weight, blocks of columns,
    programs a sum.
    """

    rows: int
    outputs: int
    blocks: int
    split: int
    warps: int = 4
    stages: int = 3


@frozen
class VoteTile:
    """For the gradient tile: rows and columns of the weight, rows of activations at a time."""

    outputs: int
    columns: int
    terms: int
    warps: int = 8
    stages: int = 2


def elementwise(rows: int, columns: int) -> Tile:
    """For kernels that visit every element of a weight once."""
    if INTERPRETED:  # a program costs the same, whatever its size
        return Tile(min(power_of_two_up(rows), 256), min(max(128, power_of_two_up(columns)), 4096))
    return Tile(16, 256)


def _shared(entry: Entry, programs: int, steps: int) -> int:
    """Programs that share a sum of ``steps`` steps, until they fill the GPU; at least 4 steps each,
    and at most 16.
    """
    return max(1, min(cdiv(entry.fill, max(1, programs)), steps // 4, 16))


def choose_row(outputs: int, columns: int, integer: bool, device: torch.device) -> RowTile:
    """For ``linear`` with one row."""
    blocks = cdiv(columns, 128)
    if INTERPRETED:
        size = min(power_of_two_up(blocks), 32)
        return RowTile(min(power_of_two_up(outputs), 64), size, 2 if blocks > size else 1)
    one = chosen_entry(("row", "int8" if integer else "float"), 1, outputs, columns, device)
    split = _shared(one, cdiv(outputs, one.outputs), cdiv(blocks, one.blocks))
    return RowTile(one.outputs, one.blocks, split, one.warps, one.stages)


def choose_linear(
    rows: int, outputs: int, columns: int, dtype: torch.dtype, wide: bool, device: torch.device
) -> ProductTile:
    """For ``linear``, whose sums run over ``columns``; ``wide``: in 64 bits."""
    blocks = cdiv(columns, 128)
    if INTERPRETED:
        size = min(power_of_two_up(blocks), 16)
        return ProductTile(_bounded(rows), _bounded(outputs), size, 2 if blocks > size else 1)
    one = chosen_entry(("linear", operands_of(dtype, wide=wide)), rows, outputs, columns, device)
    split = _shared(
        one, cdiv(rows, one.rows) * cdiv(outputs, one.outputs), cdiv(blocks, one.blocks)
    )
    return ProductTile(one.rows, one.outputs, one.blocks, split, one.warps, one.stages)


def choose_grad_input(
    rows: int, outputs: int, columns: int, dtype: torch.dtype, wide: bool, device: torch.device
) -> ProductTile:
    """For ``linear_grad_input``, whose sums run over ``outputs``; ``wide``: in 64 bits."""
    blocks = cdiv(columns, 128)
    if INTERPRETED:
        tile = ProductTile(
            _bounded(rows), max(32, _bounded(outputs)), min(power_of_two_up(blocks), 16), 1
        )
        return ProductTile(tile.rows, tile.outputs, tile.blocks, 2 if outputs > tile.outputs else 1)
    one = chosen_entry(
        ("grad_input", operands_of(dtype, wide=wide)), rows, outputs, columns, device
    )
    split = _shared(
        one, cdiv(rows, one.rows) * 4 * cdiv(blocks, one.blocks), cdiv(outputs, one.outputs)
    )
    return ProductTile(one.rows, one.outputs, one.blocks, split, one.warps, one.stages)


def choose_votes(
    terms: int,
    outputs: int,
    columns: int,
    dtype: torch.dtype,
    by_shifts: bool,
    device: torch.device,
) -> VoteTile:
    """For votes cast from a product over ``terms`` rows."""
    if INTERPRETED:
        return VoteTile(
            _bounded(outputs),
            min(max(128, power_of_two_up(columns)), 512),
            max(32, _bounded(terms)),
        )
    one = chosen_entry(
        ("votes", operands_of(dtype, shifts=by_shifts)), terms, outputs, columns, device
    )
    return VoteTile(one.outputs, 128 * one.blocks, one.rows, one.warps, one.stages)


def _bounded(size: int) -> int:
    """A tile that a small operand fits in, within what a tensor core takes and an interpreter
    likes.
    """
    return min(max(16, power_of_two_up(size)), 256)
