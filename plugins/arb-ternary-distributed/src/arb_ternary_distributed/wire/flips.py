"""Lists of the trits that a step has changed, and how they travel between ranks.

A flip is a position (the flat index ``row * K + column``) and a direction, -1 or 1: a trit moves at
most one step. On the wire, weights are cut into blocks of 32,768. First comes the number of flips
of each block (uint16), then a uint16 for each flip: the position within its block in the low 15
bits, and a 1 for upwards in the highest. Positions ascend. The
size of the counts follows from the number of weights alone, so ranks that exchange the counts first
know the size of the rest: there are no headers.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from arb_ternary.backends.dispatch import kernel
from arb_ternary.backends.layout import BLOCK, PLANES
from arb_ternary.backends.protocol import WeightShape
from arb_ternary_distributed.wire.digits import require

#: Bytes of a block of a packed weight.
_LANES: Final = BLOCK // PLANES
#: Weights that share a count.
FLIP_BLOCK: Final = 1 << 15
_POSITION: Final = FLIP_BLOCK - 1
_REPLICAS_DIFFER: Final = "a flip leads outside -1..1: the replicas of this weight differ"


# --- messages


def count_bytes(size: int) -> int:
    """Return the number of bytes of the counts in front of a message about ``size`` weights."""
    return 2 * -(-size // FLIP_BLOCK)


def flips_counted(counts: Tensor) -> int:
    """Return how many flips, of two bytes each, follow the counts (uint8)."""
    return int(_words(counts).sum())


def encode_flips(positions: Tensor, directions: Tensor, size: int) -> Tensor:
    """Return flips of ``size`` weights as a message: uint8 ``[count_bytes(size) + 2 F]``.

    Args:
        positions: int64 ``[F]``, ascending and distinct, in ``0 .. size - 1``.
        directions: ``[F]``, -1 or 1.
        size: number of weights that positions count; several matrices may follow one another.
    """
    counts = torch.bincount(positions // FLIP_BLOCK, minlength=count_bytes(size) // 2)
    entries = (positions & _POSITION) | (directions > 0).to(torch.int64) << 15
    return torch.cat([counts, entries]).to(torch.int16).view(torch.uint8)


def decode_flips(message: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return positions (int64 ``[F]``) and directions (int8 ``[F]``) of a message.

    Raises:
        ValueError: the message does not have the length that its counts give.
    """
    front = count_bytes(size)
    counts = _words(message[:front])
    entries = _words(message[front:])
    if message.numel() < front or int(counts.sum()) != entries.numel():
        raise ValueError(
            f"a message about {size} weights has {message.numel()} bytes, which its counts do not "
            f"explain"
        )
    blocks = torch.arange(counts.numel(), device=message.device).repeat_interleave(
        counts, output_size=entries.numel()
    )
    positions = blocks * FLIP_BLOCK + (entries & _POSITION)
    directions = (entries >> 15) * 2 - 1
    return positions, directions.to(torch.int8)


def _words(message: Tensor) -> Tensor:
    """Return the int64 numbers of pairs of bytes, which begin at an even one."""
    return message.view(torch.int16).to(torch.int64) & 0xFFFF


# --- kernels for the layout of the torch backend


def flip_list(before: Tensor, after: Tensor, shape: WeightShape) -> tuple[Tensor, Tensor]:
    """List the trits in which two packed weights differ.

    Only bytes that differ are decoded.

    Returns:
        Positions (int64 ``[F]``, ascending) and directions (int8 ``[F]``).
    """
    differing = torch.nonzero((before != after).view(-1)).view(-1)
    codes_before = _codes(before.reshape(-1)[differing])
    codes_after = _codes(after.reshape(-1)[differing])
    moved = (codes_after - codes_before).view(-1)
    flipped = torch.nonzero(moved).view(-1)
    positions = _positions(differing, shape).view(-1)
    ascending, order = positions[flipped].sort()
    return ascending, moved[flipped][order]


def _codes(packed: Tensor) -> Tensor:
    """Return the four codes of each byte, int8 ``[B, 4]``."""
    shifts = torch.arange(0, 2 * PLANES, 2, dtype=torch.uint8, device=packed.device)
    return (packed.unsqueeze(1) >> shifts & 3).view(torch.int8)


def _positions(bytes_B: Tensor, shape: WeightShape) -> Tensor:
    """Return the positions of the four codes of bytes of a packed weight, int64 ``[B, 4]``."""
    columns = shape.in_features
    width = max(-(-columns // PLANES), 1)
    row = bytes_B // width
    byte = bytes_B % width
    # Columns beyond the last whole block have as few lanes as they need.
    blocks = columns // BLOCK
    in_rest = byte >= blocks * _LANES
    lane = torch.where(in_rest, byte - blocks * _LANES, byte % _LANES)
    lanes = torch.where(in_rest, width - blocks * _LANES, _LANES)
    block = torch.where(in_rest, blocks, byte // _LANES)
    first = row * columns + block * BLOCK + lane
    planes = torch.arange(PLANES, device=bytes_B.device)
    return first.unsqueeze(1) + lanes.unsqueeze(1) * planes


def apply_flips_(weight: Tensor, shape: WeightShape, positions: Tensor, directions: Tensor) -> None:
    """Move the trits at distinct positions of a packed weight, in place.

    Raises:
        ValueError: a position is outside the weight, or a trit would leave -1..1, because the flips
            are those of another weight. Nothing has changed then. On a GPU it is an assertion of
            the device.
    """
    if not positions.numel():
        return
    _require_inside(positions, shape)
    columns = shape.in_features
    width = -(-columns // PLANES)
    row = positions // columns
    column = positions % columns
    # Columns beyond the last whole block have as few lanes as they need.
    block = column // BLOCK
    blocks = columns // BLOCK
    rest = max(width - blocks * _LANES, 1)
    lanes = torch.where(block == blocks, rest, _LANES)
    in_block = column % BLOCK
    byte = row * width + block * _LANES + in_block % lanes
    shift = in_block // lanes * 2
    stored = weight.view(-1)
    code = (stored[byte] >> shift & 3) + directions
    require(((code >= 0) & (code <= 2)).all(), _REPLICAS_DIFFER)
    # Sums in uint8 wrap, and no code leaves its two bits: several flips of a byte simply add up.
    change = directions.to(torch.int16) << shift.to(torch.int16)
    stored.index_add_(0, byte, change.to(torch.uint8))


def _require_inside(positions: Tensor, shape: WeightShape) -> None:
    rows = shape.out_features
    columns = shape.in_features
    low, high = positions.aminmax()
    is_inside = (low >= 0) & (high < rows * columns)
    require(is_inside, f"a flip is outside a weight of {rows} x {columns}")


# --- the same for any layout


def unpacked_flip_list(
    backend: str,
    before: Tensor,
    after: Tensor,
    shape: WeightShape,
) -> tuple[Tensor, Tensor]:
    """List flips as :func:`flip_list` does, for any layout: all trits are decoded."""
    unpack = kernel(backend, "unpack")
    moved = (unpack(after, shape) - unpack(before, shape)).view(-1)
    positions = torch.nonzero(moved).view(-1)
    return positions, moved[positions]


def repacked_flips_(
    backend: str,
    weight: Tensor,
    shape: WeightShape,
    positions: Tensor,
    directions: Tensor,
) -> None:
    """Apply flips as :func:`apply_flips_` does, for any layout: all trits are packed again."""
    if not positions.numel():
        return
    _require_inside(positions, shape)
    trits: Tensor = kernel(backend, "unpack")(weight, shape)
    moved = trits.view(-1).index_add_(0, positions, directions)[positions]
    require((moved.abs() <= 1).all(), _REPLICAS_DIFFER)
    weight.copy_(kernel(backend, "pack")(trits))
