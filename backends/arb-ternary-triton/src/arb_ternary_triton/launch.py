"""Launch kernels, compiled or in the interpreter, with the options that exact results need."""

from __future__ import annotations

from typing import Any, Final

import numpy
import torch
import triton
from torch import Tensor

from arb_ternary_triton.gpu import gpu_of
from arb_ternary_triton.packing import check_packing

#: Whether Triton's kernels were made for its interpreter, which is decided when the first of them
#: is imported.
INTERPRETED: Final = bool(triton.knobs.runtime.interpret)


#: Hashes of the compiled kernels that :func:`check_packing` has seen.
_checked: set[str] = set()


def instruction_set(device: torch.device) -> int:
    """Return the instructions that kernels may use, as ``kernels.decoding`` numbers them."""
    if INTERPRETED:
        return 0
    return gpu_of(device).instruction_set


def serves(tensor: Tensor) -> bool:
    """Return whether kernels can reach the memory of a tensor."""
    return tensor.is_cpu if INTERPRETED else tensor.is_cuda


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *arguments: Any,
    warps: int = 4,
    stages: int = 2,
    **constants: Any,
) -> None:
    """Run ``kernel`` on ``grid``; an empty grid runs nothing.

    Multiplications and additions are not fused: the number format says where results are rounded.

    Args:
        kernel: a function under ``triton.jit``.
        grid: numbers of programs.
        arguments: positional arguments. The device is that of the first tensor among them.
        warps: warps per program.
        stages: stages of the software pipeline.
        constants: compile-time arguments.
    """
    if 0 not in grid:
        _start(kernel, grid, arguments, constants, warps, stages)


def _start(
    kernel: Any,
    grid: tuple[int, ...],
    arguments: tuple[Any, ...],
    constants: dict[str, Any],
    warps: int,
    stages: int,
) -> None:
    """Start a kernel; tests replace this function to record what a GPU would run."""
    if INTERPRETED:
        # numpy warns about infinities and NaN, which are ordinary values to a kernel.
        with numpy.errstate(all="ignore"):
            kernel[grid](*arguments, **constants)
        return
    device = next(argument.device for argument in arguments if isinstance(argument, Tensor))
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": False}
    with torch.cuda.device(device):
        compiled = kernel[grid](*arguments, **options, **constants)
    if compiled.hash not in _checked:
        check_packing(compiled.asm["ttgir"])
        _checked.add(compiled.hash)


def cdiv(size: int, tile: int) -> int:
    """Return ``ceil(size / tile)``."""
    return -(-size // tile)


def power_of_two_up(size: int) -> int:
    """Return the smallest power of two that is at least ``size``, and at least 1."""
    return 1 << max(0, size - 1).bit_length()
