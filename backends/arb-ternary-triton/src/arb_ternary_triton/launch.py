"""Starting kernels: compiled, or in the interpreter, with the options that exactness asks for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy
import torch
import triton
from attrs import define
from torch import Tensor

from arb_ternary_triton.gpu import Gpu

# : Whether Triton's kernels were made for its interpreter, which is decided when the first of them
# is imported.
INTERPRETED: Final = bool(triton.knobs.runtime.interpret)


@define
class Launch:
    """What would have been started: the kernel, its arguments, compile-time constants and
    options.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    warps: int
    stages: int


@define
class _Recorder:
    """Kernels that are noted instead of started."""

    launches: list[Launch]
    gpu: Gpu


_recorder: _Recorder | None = None


@contextmanager
def recording(gpu: Gpu) -> Iterator[list[Launch]]:
    """Note kernels instead of starting them, so that a machine without a GPU can compile what
    ``gpu`` would run.
    """
    global _recorder  # noqa: PLW0603
    _recorder = _Recorder([], gpu)
    try:
        yield _recorder.launches
    finally:
        _recorder = None


def recorded_gpu() -> Gpu | None:
    """The GPU in mind while launches are recorded."""
    return None if _recorder is None else _recorder.gpu


def on_nvidia() -> bool:
    """Whether kernels are for NVIDIA's GPUs, with their dot product of four bytes, and not for
    AMD's.
    """
    if _recorder is not None:
        return _recorder.gpu.nvidia
    return not INTERPRETED and torch.version.hip is None


def serves(tensor: Tensor) -> bool:
    """Whether kernels can reach the memory of a tensor."""
    return tensor.is_cpu if INTERPRETED or _recorder is not None else tensor.is_cuda


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *arguments: Any,
    warps: int = 4,
    stages: int = 2,
    **constants: Any,
) -> None:
    """Run ``kernel`` on ``grid``; an empty grid runs nothing.

    Multiplications and additions are not fused: the number format says where a rounding takes
    place.

    Args:
        kernel: a function under ``triton.jit``.
        grid: numbers of programs.
        arguments: positional arguments; the device is that of the first tensor among them.
        warps: of a program.
        stages: of the software pipeline.
        constants: compile-time arguments.
    """
    if 0 in grid:
        return
    if _recorder is not None:
        _recorder.launches.append(Launch(kernel, grid, arguments, constants, warps, stages))
        return
    if INTERPRETED:
        # numpy warns of infinities and NaN, which are values like others to a kernel.
        with numpy.errstate(all="ignore"):
            kernel[grid](*arguments, **constants)
        return
    device = next(argument.device for argument in arguments if isinstance(argument, Tensor))
    with torch.cuda.device(device):
        kernel[grid](
            *arguments, num_warps=warps, num_stages=stages, enable_fp_fusion=False, **constants
        )


def cdiv(size: int, tile: int) -> int:
    """``ceil(size / tile)``."""
    return -(-size // tile)


def power_of_two_up(size: int) -> int:
    """The smallest power of two that is at least ``size``, and at least 1."""
    return 1 << max(0, size - 1).bit_length()
