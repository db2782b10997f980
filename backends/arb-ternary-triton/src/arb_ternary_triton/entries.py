"""Tile sizes by kind of operands and number of rows: the entries of tables, and a model of them.

The model follows a GPU's data sheet and the compiled code: tiles as large as the registers hold
without a spill, and sums that programs share until there are two programs per multiprocessor.
Nothing in it was measured.
"""

from __future__ import annotations

from typing import Final

import torch
from attrs import astuple, field, frozen, validators

from arb_ternary_triton.gpu import Gpu

#: A kernel and its operands. ``wide``: sums in 64 bits, band by band. ``shifts``: votes by shifts,
#: in 64 bits.
Kind = tuple[str, str]
KINDS: Final[tuple[Kind, ...]] = (
    ("row", "int8"),
    ("row", "float"),
    ("linear", "int8"),
    ("linear", "wide"),
    ("linear", "16 bits"),
    ("linear", "float32"),
    ("grad_input", "int8"),
    ("grad_input", "wide"),
    ("grad_input", "16 bits"),
    ("grad_input", "float32"),
    ("votes", "int8"),
    ("votes", "shifts"),
    ("votes", "16 bits"),
    ("votes", "float32"),
)
#: Numbers of rows of activations that tables distinguish: each entry serves up to this number, the
#: last one also more.
ROWS: Final = (1, 16, 32, 128, 512, 2048)


def _power_of_two(_instance: object, attribute: object, value: int) -> None:
    if value < 1 or value & (value - 1):
        name = getattr(attribute, "name", attribute)
        raise ValueError(f"{name} must be a power of two, got {value}")


_SIZE: Final = [validators.instance_of(int), _power_of_two]


@frozen
class Entry:
    """A choice of tile sizes.

    Attributes:
        rows: rows of activations per tile; for a votes kernel, rows that are summed at a time.
        outputs: rows of the weight per tile.
        blocks: blocks of 128 columns per tile or step.
        warps: warps per program.
        stages: pipeline stages.
        fill: programs that keep the GPU busy, up to which sums are shared; 0 shares none.
    """

    rows: int = field(validator=_SIZE)
    outputs: int = field(validator=_SIZE)
    blocks: int = field(validator=_SIZE)
    warps: int = field(validator=_SIZE)
    stages: int = field(validator=[validators.instance_of(int), validators.ge(1), validators.le(8)])
    fill: int = field(validator=[validators.instance_of(int), validators.ge(0)])

    def to_json(self) -> list[int]:
        """Return the numbers as tables store them."""
        return list(astuple(self))


def kind_name(kind: Kind) -> str:
    """Return a kind as tables name it."""
    return " ".join(kind)


def row_bound(rows: int) -> int:
    """Return the number in :data:`ROWS` that stands for ``rows``."""
    for bound in ROWS:
        if rows <= bound:
            return bound
    return ROWS[-1]


def operands_of(dtype: torch.dtype, *, wide: bool = False, shifts: bool = False) -> str:
    """Return the kind of operands of a dtype."""
    if dtype is torch.int8:
        if wide:
            return "wide"
        return "shifts" if shifts else "int8"
    return "float32" if dtype is torch.float32 else "16 bits"


def bounds_of(kind: Kind) -> tuple[int, ...]:
    """Return the numbers of rows that tables distinguish for a kind."""
    return ROWS[:1] if kind[0] == "row" else ROWS


def modelled(kind: Kind, rows: int, gpu: Gpu) -> Entry:
    """Return the model's choice for up to ``rows`` rows."""
    kernel, operands = kind
    fill = 2 * gpu.multiprocessors
    # An AMD GPU has 64 KiB of shared memory per program, which three stages of floats exceed.
    stages = 3 if gpu.nvidia or operands in ("int8", "shifts") else 2
    if kernel == "votes":
        if operands == "float32":
            return Entry(16, 32, 1, 4, 2, 0)
        # Shifts take 64-bit registers, so more threads share them.
        warps = 8 if operands == "shifts" else 4
        return Entry(64 if rows > 32 else 32, 64, 1, warps, stages, 0)
    if kernel == "row":
        return Entry(1, 16 if operands == "int8" else 8, 4, 4, 3, fill)
    if operands == "wide":
        # Few sums per program, because each takes twice the registers.
        return Entry(16, 64, 1, 4, 2, 0)

    tile = 16 if rows <= 16 else 32
    if operands == "float32":
        outputs, blocks = (64, 1) if kernel == "linear" else (32, 2)
        return Entry(tile, outputs, blocks, 4, 3, fill if rows <= 128 else 0)
    if rows <= 32:
        return Entry(tile, 64, 2, 4, 3, fill)
    if rows <= 128:
        return Entry(64, 64, 2, 4, 3, fill)
    if kernel == "linear":
        return Entry(128, 128, 1, 8, stages, 0)
    return Entry(128, 64, 4, 8, stages, 0)
