"""Tile sizes by kind of operands and number of rows: the entries of tables, and a model of them.

The model follows a GPU's data sheet and the compiled code: tiles as large as the registers hold
without a spill, and sums that programs share until there are two programs per multiprocessor.
Nothing in it was measured.
"""

from __future__ import annotations

from functools import lru_cache
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
#: Shapes of calls whose choices are kept in memory; prompts have any number of rows.
LAST_CALLS: Final = 1024


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


@lru_cache(LAST_CALLS)
def modelled(kind: Kind, rows: int, gpu: Gpu) -> Entry:
    """Return the model's choice for ``rows`` rows."""
    kernel, operands = kind
    rows = row_bound(rows)
    fill = 2 * gpu.multiprocessors
    if kernel == "votes":
        return _votes(operands, rows, gpu)
    if kernel == "row":
        # 16 or 8 blocks of 128 columns: each thread has 64 bytes of the weight on their way.
        return Entry(1, 16, 16 if operands == "int8" else 8, 4, 3, fill)
    # A warp of RDNA has 32 threads, and its compiler keeps a whole decoded tile in registers:
    # tiles of floats take eight warps.
    rdna = gpu.family.startswith("gfx11")
    warps = 8 if rdna and kernel == "linear" and operands != "int8" else 4
    if operands == "wide":
        # Few sums per program, because each takes twice the registers.
        if kernel == "linear":
            return Entry(16, 32, 1, 8, 2, 0)
        return Entry(16, 64, 1, 4, 2, 0)

    tile = 16 if rows <= 16 else 32
    if operands == "float32":
        outputs, blocks = (64, 1) if kernel == "linear" else (32, 2)
        if rdna and kernel == "linear":
            tile, outputs = 16, 16
        return Entry(tile, outputs, blocks, warps, 3, fill if rows <= 128 else 0)
    if operands == "int8" and gpu.nvidia:
        return _int8_tile(kernel, rows, gpu)
    stages = 3 if gpu.nvidia else 2
    # AMD's compiler keeps a transposed tile of floats in registers.
    narrow = kernel == "grad_input" and not gpu.nvidia and (operands == "16 bits" or rdna)
    outputs = 32 if narrow else 64
    if rows <= 32:
        # Groups of 32 take registers, too.
        few = rdna or (gpu.family in ("sm_120", "sm_121") and rows <= 16)
        blocks = 1 if few and kernel == "linear" and operands == "16 bits" else 2
        return Entry(tile, outputs, blocks, warps, stages, fill)
    if kernel == "linear" and (rows > 128 or operands == "16 bits"):
        # Two blocks of 16 bits are more shared memory than most GPUs have.
        shared = fill if rows <= 128 else 0
        return Entry(64, 128 if gpu.nvidia else outputs, 1, warps, stages, shared)
    if rows <= 128:
        return Entry(64, outputs, 2, warps, stages, fill)
    if gpu.nvidia:
        return Entry(128, 64, 4, 8, stages, 0)
    return Entry(64, outputs, 2, warps, stages, 0)


def _votes(operands: str, rows: int, gpu: Gpu) -> Entry:
    if operands == "float32":
        return Entry(16, 32, 1, 4, 2, 0)
    # An AMD GPU has 64 KiB of shared memory per program, which three stages exceed.
    stages = 3 if gpu.nvidia or operands in ("int8", "shifts") else 2
    # More threads share a tile where the matrix instruction or the compiler leaves fewer registers.
    few = gpu.family not in ("sm_80", "sm_90", "gfx942")
    warps = 8 if few else 4
    # RDNA keeps the operands of 64 terms of 16 bits in registers that narrow accumulators need.
    short = rows <= 32 or (gpu.family.startswith("gfx11") and operands == "16 bits")
    return Entry(32 if short else 64, 64, 1, warps, stages, 0)


def _int8_tile(kernel: str, rows: int, gpu: Gpu) -> Entry:
    """Return the tile of an int8 product on an NVIDIA GPU.

    The left operand is decoded into the registers of the matrix instruction, which takes four
    warps, each with its own rows of the tile. A GPU that reads the right operand from shared memory
    has registers left for a larger tile.
    """
    fill = 2 * gpu.multiprocessors
    large = gpu.family in ("sm_90", "sm_100", "sm_103")
    if kernel == "grad_input":
        # One plane of four blocks is the 128 columns of two matrix instructions.
        if rows <= 32:
            return Entry(16 if rows <= 16 else 32, 128 if rows <= 16 else 64, 4, 4, 3, fill)
        outputs, stages = (128, 2) if large else (64, 3)
        # Twice the rows halve the times that the weight is decoded, where the registers suffice.
        tile = 128 if rows > 128 and gpu.family == "sm_90" else 64
        return Entry(tile, outputs, 4, 4, stages, fill if rows <= 128 else 0)
    if rows <= 32:
        # With three stages, the compiler spills a register for these two.
        stages = 2 if gpu.family in ("sm_86", "sm_89") else 3
        return Entry(16 if rows <= 16 else 32, 64, 2, 4, stages, fill)
    if rows <= 128:
        return Entry(64, 128 if large else 64, 2, 4, 3, fill)
    return Entry(128 if large else 64, 128, 1, 4, 3, 0)
