"""How large a tile a kernel takes, by kind of operands and number of rows: what tables hold, and a
model of it.

The model is what a GPU's data sheet and the compiled code suggest: tiles as large as the registers
hold without a spill, and sums that are shared until there are two programs for each multiprocessor.
Nothing in it was measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
from attrs import astuple, field, frozen, validators

from arb_ternary_triton.gpu import Gpu

# : A kernel and its operands. ``wide``: sums in 64 bits, band by band; ``shifts``: votes by shifts,
# in 64 bits.
Kind = tuple[str, str]
_PRODUCTS: Final = ("int8", "wide", "16 bits", "float32")
KINDS: Final[tuple[Kind, ...]] = (
    ("row", "int8"),
    ("row", "float"),
    *(("linear", operands) for operands in _PRODUCTS),
    *(("grad_input", operands) for operands in _PRODUCTS),
    *(("votes", operands) for operands in ("int8", "shifts", "16 bits", "float32")),
)
# : Numbers of rows of activations that tables tell apart: up to each; the last serves what is above
# it too.
ROWS: Final = (1, 16, 32, 128, 512, 2048)


def _power_of_two(_instance: object, attribute: object, value: int) -> None:
    if value < 1 or value & (value - 1):
        raise ValueError(
            f"{getattr(attribute, 'name', attribute)} must be a power of two, got {value}"
        )


_SIZE: Final = [validators.instance_of(int), _power_of_two]


@frozen
class Entry:
    """A choice.

    Attributes:
        rows: of activations a tile; of a votes kernel, rows that it sums at a time.
        outputs: rows of the weight a tile.
        blocks: of 128 columns a tile, or a step.
        warps: of a program.
        stages: of the pipeline.
        fill: programs that keep the GPU busy, until which sums are shared; 0 shares none.
    """

    rows: int = field(validator=_SIZE)
    outputs: int = field(validator=_SIZE)
    blocks: int = field(validator=_SIZE)
    warps: int = field(validator=_SIZE)
    stages: int = field(validator=[validators.instance_of(int), validators.ge(1), validators.le(8)])
    fill: int = field(validator=[validators.instance_of(int), validators.ge(0)])

    def to_json(self) -> list[int]:
        """As tables write it."""
        return list(astuple(self))


def kind_name(kind: Kind) -> str:
    """As tables write it."""
    return " ".join(kind)


def row_bound(rows: int) -> int:
    """The number in :data:`ROWS` that stands for ``rows``."""
    return next((bound for bound in ROWS if rows <= bound), ROWS[-1])


def operands_of(dtype: torch.dtype, *, wide: bool = False, shifts: bool = False) -> str:
    """The kind of operands of a dtype."""
    if dtype is torch.int8:
        return "wide" if wide else "shifts" if shifts else "int8"
    return "float32" if dtype is torch.float32 else "16 bits"


def bounds_of(kind: Kind) -> Iterator[int]:
    """Numbers of rows that a kind tells apart."""
    yield from ROWS[:1] if kind[0] == "row" else ROWS


def modelled(kind: Kind, rows: int, gpu: Gpu) -> Entry:
    """The model's choice for up to ``rows`` rows."""
    kernel, operands = kind
    fill = 2 * gpu.multiprocessors
    # An AMD GPU has 64 KiB of shared memory a program, which three stages of floats exceed.
    stages = 3 if gpu.nvidia or operands in ("int8", "shifts") else 2
    if kernel == "votes":
        if operands == "float32":
            return Entry(16, 32, 1, 4, 2, 0)
        # Shifts take 64-bit registers, so more threads share them.
        return Entry(64 if rows > 32 else 32, 64, 1, 8 if operands == "shifts" else 4, stages, 0)
    if kernel == "row":
        return Entry(1, 16 if operands == "int8" else 8, 4, 4, 3, fill)
    if operands == "wide":  # few sums a program, since they take twice the registers
        return Entry(16, 64, 1, 4, 2, 0)
    tile = 16 if rows <= 16 else 32
    if operands == "float32":
        shape = (64, 1) if kernel == "linear" else (32, 2)
        return Entry(tile, *shape, 4, 3, fill if rows <= 128 else 0)
    if rows <= 32:
        return Entry(tile, 64, 2, 4, 3, fill)
    if rows <= 128:
        return Entry(64, 64, 2, 4, 3, fill)
    large = (128, 128, 1) if kernel == "linear" else (128, 64, 4)
    return Entry(*large, 8, stages, 0)
