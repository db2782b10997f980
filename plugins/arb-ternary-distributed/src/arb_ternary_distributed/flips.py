"""Which trits a step has changed, and how that travels between ranks.

A flip is a place (the flat index ``row * K + column``) and a direction, -1 or 1: a trit moves at
most one step. On the wire, weights are cut into blocks of 32,768: first comes the number of flips
of each block (uint16), then a uint16 for each flip, the place within its block in the low 15 bits
and a 1 for upwards in the highest; all little endian, places ascending. How many bytes the counts
take follows from the number of weights alone, so ranks that exchange those first know how long the
rest is: there are no headers.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from arb_ternary.backends.dispatch import kernel
from arb_ternary.backends.layout import BLOCK, PLANES
from arb_ternary.backends.protocol import WeightShape
from arb_ternary_distributed.digits import require

#: Weights that share a count.
FLIP_BLOCK: Final = 1 << 15
_PLACE: Final = FLIP_BLOCK - 1
_WORD: Final = 0xFFFF


def count_bytes(size: int) -> int:
    """Bytes of the counts at the front of a message about ``size`` weights."""
    return 2 * -(-size // FLIP_BLOCK)


def flips_counted(counts: Tensor) -> int:
    """How many flips follow the counts (uint8, the front of a message); each takes two bytes."""
    return int(_words(counts).sum())


def encode_flips(places: Tensor, directions: Tensor, size: int) -> Tensor:
    """Flips of ``size`` weights as a message: uint8 ``[count_bytes(size) + 2 F]``.

    Args:
        places: int64 ``[F]``, ascending and distinct, in ``0 .. size - 1``.
        directions: ``[F]``, -1 or 1.
        size: of the weights that the places count, which may be those of several matrices one after
            another.
    """
    counts = torch.bincount(places // FLIP_BLOCK, minlength=count_bytes(size) // 2)
    entries = (places & _PLACE) | (directions > 0).to(torch.int64) << 15
    words = torch.cat([counts, entries])
    return torch.stack([words & 0xFF, words >> 8], dim=1).to(torch.uint8).view(-1)


def decode_flips(message: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Places (int64 ``[F]``) and directions (int8 ``[F]``) of a message about ``size`` weights.

    Raises:
        ValueError: the message is not as long as its counts say.
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
    return blocks * FLIP_BLOCK + (entries & _PLACE), ((entries >> 15) * 2 - 1).to(torch.int8)


def _words(message: Tensor) -> Tensor:
    """Two bytes, the low one first, to a number: int64."""
    pairs = message.view(-1, 2).to(torch.int64)
    return pairs[:, 0] | pairs[:, 1] << 8


def flip_list(before: Tensor, after: Tensor, shape: WeightShape) -> tuple[Tensor, Tensor]:
    """Places (int64 ``[F]``, ascending) and directions (int8 ``[F]``) of the trits that two packed
    weights differ in.

    Both are in the layout of the torch backend; bytes that are equal are not decoded.
    """
    differing = torch.nonzero((before != after).view(-1)).view(-1)
    places_B4 = _places(differing, shape)
    moved_B4 = _codes(after.reshape(-1)[differing]) - _codes(before.reshape(-1)[differing])
    flipped = torch.nonzero(moved_B4.view(-1)).view(-1)
    places, order = places_B4.view(-1)[flipped].sort()
    return places, moved_B4.view(-1)[flipped][order]


def _codes(packed: Tensor) -> Tensor:
    """The four codes of each byte, int8 ``[B, 4]``."""
    shifts = torch.arange(0, 2 * PLANES, 2, dtype=torch.uint8, device=packed.device)
    return (packed.unsqueeze(1) >> shifts & 3).view(torch.int8)


def _places(bytes_B: Tensor, shape: WeightShape) -> Tensor:
    """The places of the four codes of bytes of a packed weight, int64 ``[B, 4]``."""
    columns = shape.in_features
    whole = columns // BLOCK * BLOCK
    width = -(-columns // PLANES)
    row = bytes_B // max(width, 1)
    byte = bytes_B % max(width, 1)
    in_rest = byte >= whole // PLANES
    lane = torch.where(in_rest, byte - whole // PLANES, byte % (BLOCK // PLANES))
    first = torch.where(in_rest, whole, byte // (BLOCK // PLANES) * BLOCK) + lane
    lanes = torch.where(in_rest, width - whole // PLANES, BLOCK // PLANES)
    planes = torch.arange(PLANES, device=bytes_B.device)
    return (row * columns + first).unsqueeze(1) + lanes.unsqueeze(1) * planes


def apply_flips_(weight: Tensor, shape: WeightShape, places: Tensor, directions: Tensor) -> None:
    """Move the trits at distinct places of a packed weight in the layout of the torch backend, in
    place.

    Raises:
        ValueError: a place is outside the weight, or a trit would leave -1..1, so that this weight
            is not the one from which the flips come, and nothing has changed; on a GPU an assertion
            of the device.
    """
    if not places.numel():
        return
    columns = shape.in_features
    _require_inside(places, shape)
    whole = columns // BLOCK * BLOCK
    row = places // columns
    column = places % columns
    rest = -(-(columns - whole) // PLANES)
    in_rest = column >= whole
    lanes = torch.where(in_rest, max(rest, 1), BLOCK // PLANES)
    within = torch.where(in_rest, column - whole, column % BLOCK)
    start = torch.where(in_rest, whole // PLANES, column // BLOCK * (BLOCK // PLANES))
    byte = row * -(-columns // PLANES) + start + within % lanes
    shift = within // lanes * 2
    stored = weight.view(-1)
    code = (stored[byte] >> shift & 3) + directions
    require(
        ((code >= 0) & (code <= 2)).all(),
        "a flip leads outside -1..1: the replicas of this weight differ",
    )
    # Sums in uint8 wrap, and no code leaves its two bits: several flips of a byte simply add up.
    stored.index_add_(
        0, byte, (directions.to(torch.int16) << shift.to(torch.int16)).to(torch.uint8)
    )


def _require_inside(places: Tensor, shape: WeightShape) -> None:
    low, high = places.aminmax()
    rows = shape.out_features
    columns = shape.in_features
    require(
        (low >= 0) & (high < rows * columns), f"a flip is outside a weight of {rows} x {columns}"
    )


def unpacked_flip_list(
    backend: str, before: Tensor, after: Tensor, shape: WeightShape
) -> tuple[Tensor, Tensor]:
    """As :func:`flip_list`, for any layout: all trits are decoded."""
    moved = (
        kernel(backend, "unpack")(after, shape) - kernel(backend, "unpack")(before, shape)
    ).view(-1)
    places = torch.nonzero(moved).view(-1)
    return places, moved[places]


def repacked_flips_(
    backend: str, weight: Tensor, shape: WeightShape, places: Tensor, directions: Tensor
) -> None:
    """As :func:`apply_flips_`, for any layout: all trits are decoded and packed again."""
    if not places.numel():
        return
    _require_inside(places, shape)
    trits: Tensor = kernel(backend, "unpack")(weight, shape)
    moved = trits.view(-1).index_add_(0, places, directions)[places]
    require(
        (moved.abs() <= 1).all(), "a flip leads outside -1..1: the replicas of this weight differ"
    )
    weight.copy_(kernel(backend, "pack")(trits))
