"""A lane: a target that kernels are compiled for, and what differs between targets.

Every kernel is written once. On CUDA a block's threads share ``T.Parallel`` loops, and sizes of
weights and options are constants of the compiled kernel, so that loads are wide and no code is
compiled that a call does not need. As C++ the same loops are serial, and sizes and options are
arguments: one build of a kernel serves every shape and choice, because compiling takes longest
there.
"""

from __future__ import annotations

import logging
import shlex
import subprocess
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from threading import RLock
from types import ModuleType
from typing import Any, Final

import torch
from attrs import define, field, frozen

from arb_ternary.environment import left_unchanged
from arb_ternary.errors import EnvironmentProblem
from arb_ternary_tilelang.cache import build_flag, taking_turns, tidy
from arb_ternary_tilelang.probe import COMPILERS, cpu_compiler, cuda_compiler

#: Products are not contracted with sums: the number format says where a rounding takes place.
CPU_FLAGS: Final = ("-O3", "-march=native", "-ffp-contract=off", "-w")
CUDA_FLAGS: Final = ("--fmad=false",)
#: Bytes of an operand of a matrix product, where they are not one.
_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}


#: The compute capability from which on a target has instructions that only its ``a`` form takes:
#: TileLang uses those that divide registers among warps.
_OWN_INSTRUCTIONS: Final = 90
#: Source of functions that kernels call.
INTRINSICS: Final = (Path(__file__).parent / "kernels" / "intrinsics.h").read_text()

#: A choice that a kernel is compiled for, or None where it is made by an argument at each call.
Option = bool | int | None


def given(option: Option, argument: Any) -> Any:
    """Whether an option is on in a kernel, by the compiled constant or else by the argument."""
    if option is None:
        return argument != 0
    return bool(option)


@frozen
class Tiles:
    """Sizes of tiles of a product.

    Attributes:
        rows: rows of a tile of the result.
        columns: columns of a tile of the result; a multiple of 16.
        depth: terms of one byte of a sum in shared memory; a multiple of 128 on CUDA, else of 32.
        threads: threads of a block.
        stages: stages of the pipeline of copies into shared memory.
    """

    rows: int
    columns: int
    depth: int
    threads: int
    stages: int


@frozen
class TileSet:
    """Tiles of the kernels of a lane.

    Attributes:
        many: of a product with many rows.
        few: of a product with at most 64 rows.
        votes: of a gradient that becomes votes.
        lookups: of the gradients of looked-up rows.
    """

    many: Tiles
    few: Tiles
    votes: Tiles
    lookups: Tiles


CUDA_TILES: Final = TileSet(
    many=Tiles(128, 128, 128, 256, 3),
    few=Tiles(64, 64, 256, 128, 2),
    votes=Tiles(64, 128, 128, 128, 2),
    lookups=Tiles(8, 128, 32, 128, 1),
)
CPU_TILES: Final = TileSet(
    many=Tiles(16, 16, 32, 1, 1),
    few=Tiles(16, 16, 32, 1, 1),
    votes=Tiles(16, 32, 32, 1, 1),
    lookups=Tiles(4, 32, 32, 1, 1),
)


@define(eq=False)
class Lane:
    """A target, its compiler and the kernels compiled so far.

    Attributes:
        kind: ``c`` or ``cuda``.
        arch: ``sm_90a`` and the like; empty for ``c``.
        T: TileLang's dialect for the target.
        fixed: whether sizes and options are constants of a kernel, as always on CUDA. Then several
            words are read at a time where the sizes allow it.
    """

    kind: str
    arch: str
    T: ModuleType = field(repr=False)
    fixed: bool = False
    _built: dict[tuple[object, ...], Callable[..., None]] = field(
        factory=dict, repr=False, init=False
    )
    _lock: RLock = field(factory=RLock, repr=False, init=False)

    @property
    def cuda(self) -> bool:
        """Whether a block has threads."""
        return self.kind == "cuda"

    @property
    def target(self) -> str | dict[str, str]:
        """TileLang's name of the target."""
        if self.cuda:
            return {"kind": "cuda", "arch": self.arch}
        return "c"

    @property
    def width(self) -> int:
        """Threads of a block in kernels other than matrix products; as C++, elements of a block."""
        return 128 if self.cuda else 16

    @property
    def tiles(self) -> TileSet:
        """Tiles of the kernels."""
        return CUDA_TILES if self.cuda else CPU_TILES

    def depth(self, tiles: Tiles, dtype: str) -> int:
        """Terms of a sum in shared memory: on CUDA as many as fit into the bytes of a tile."""
        return tiles.depth // _BYTES.get(dtype, 1) if self.cuda else tiles.depth

    def size(self, name: str, value: int) -> Any:
        """A size of a tensor: a constant of the kernel if sizes are fixed, else an argument."""
        return value if self.fixed else self.T.dynamic(name)

    def constant(self, value: int, argument: Any) -> Any:
        """``value`` if sizes are fixed, else the argument of the call."""
        return value if self.fixed else argument

    def option(self, value: Option) -> Option:
        """An option of a kernel: a constant if they are fixed, else an argument, None here."""
        return value if self.fixed else None

    def whole_words(self, columns: int) -> bool:
        """Whether the 16 accumulators of a word, of 8 bits, are read and written as four words."""
        return self.fixed and columns % 16 == 0

    def grid(self, *blocks: Any, threads: int) -> Any:
        """``T.Kernel``, with threads on CUDA.

        CUDA limits all extents but the first to 65,535 blocks.
        """
        if self.cuda:
            return self.T.Kernel(*blocks, threads=threads, prelude=INTRINSICS)
        return self.T.Kernel(*blocks, prelude=INTRINSICS)

    def accumulator(self, shape: tuple[int, ...], dtype: str) -> Any:
        """Sums of a tile: in registers of the block's threads on CUDA."""
        if self.cuda:
            return self.T.alloc_fragment(shape, dtype)
        return self.shared(shape, dtype)

    def shared(self, shape: tuple[int, ...], dtype: str) -> Any:
        """Memory of a block."""
        if self.cuda:
            return self.T.alloc_shared(shape, dtype)
        return self.T.alloc_local(shape, dtype)

    def parallel(self, *extents: int) -> Any:
        """A loop over the threads of a block."""
        if self.cuda:
            return self.T.Parallel(*extents)
        if len(extents) == 1:
            return self.T.serial(*extents)
        return self.T.grid(*extents)

    @property
    def vectorized(self) -> Any:
        """A loop whose iterations are one wide store."""
        return self.T.vectorized if self.cuda else self.T.serial

    @property
    def unrolled(self) -> Any:
        """A loop that is written out on CUDA, so that arrays that it indexes lie in registers."""
        return self.T.unroll if self.cuda else self.T.serial

    def kernel(self, make: Callable[..., Any], *options: Any, **sizes: int) -> Callable[..., None]:
        """Return the kernel that ``make(lane, *options, **sizes)`` describes.

        It is compiled at the first call. The sizes are constants of it only if they are fixed.

        Raises:
            EnvironmentProblem: there is no compiler, or it refuses.
        """
        constants = tuple(sizes.items()) if self.fixed else ()
        key = (make, options, constants)
        found = self._built.get(key)
        if found is None:
            with self._lock:
                found = self._built.get(key)
                if found is None:
                    name = (make.__qualname__, repr(options), *map(repr, constants))
                    function = make(self, *options, **sizes)
                    found = self._compile(function, name)
                    self._built[key] = found
        return found

    def _compile(self, function: Any, name: tuple[str, ...]) -> Callable[..., None]:
        import tilelang

        compiler = cuda_compiler() if self.cuda else cpu_compiler()
        if compiler is None:
            wanted = " or ".join(COMPILERS)
            if self.cuda:
                wanted = "nvcc, in CUDA_HOME, PATH or /usr/local/cuda"
            raise EnvironmentProblem(
                f"backend 'tilelang' compiles its kernels when they are first used, and found no "
                f"compiler: {wanted}",
                "install one, or choose another backend: arb backends list",
            )
        fixed_flags = CUDA_FLAGS if self.cuda else CPU_FLAGS
        flags = [*fixed_flags, build_flag(compiler, not self.cuda)]
        try:
            with taking_turns(*name, str(self.target), *flags):
                built: Callable[..., None] = tilelang.compile(
                    function, target=self.target, compile_flags=flags
                )
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
            last = str(error).strip().splitlines()[-1:] or [type(error).__name__]
            raise EnvironmentProblem(
                f"backend 'tilelang': {compiler} with {shlex.join(fixed_flags)} could not build a "
                f"kernel: {last[0]}",
                "check the compiler, or choose another backend: arb backends list",
            ) from error
        tidy(built)
        return built


def _dialect(name: str) -> ModuleType:
    """Import a dialect of TileLang.

    When TileLang is imported it writes paths into the environment, PYTHONPATH among them, which
    every process that this one starts would inherit. It needs them only during the import, so the
    environment is restored. TileLang also logs every compilation and every fault to standard
    output: its handlers are removed, and its warnings go to this program's log.
    """
    with left_unchanged():
        module = import_module(name)
        import_module("tilelang").set_log_level("WARNING")
    reports = logging.getLogger("tilelang")
    reports.handlers.clear()
    reports.propagate = True
    return module


def cpu_lane() -> Lane:
    """Return a lane that compiles C++ for this machine."""
    return Lane("c", "", _dialect("tilelang.cpu.language"))


def cuda_lane(arch: str) -> Lane:
    """Return a lane that compiles CUDA for ``arch``, for example ``sm_80`` or ``sm_90a``."""
    return Lane("cuda", arch, _dialect("tilelang.language"), fixed=True)


def lane_of(device: torch.device) -> Lane:
    """Return the lane of a tensor's device.

    Raises:
        TypeError: the kernels serve no such device.
    """
    if device.type == "cpu":
        return _cpu()
    if device.type == "cuda" and torch.version.cuda is not None:
        major, minor = torch.cuda.get_device_capability(device)
        capability = 10 * major + minor
        suffix = "a" if capability >= _OWN_INSTRUCTIONS else ""
        return _cuda(f"sm_{capability}{suffix}")
    raise TypeError(f"the tilelang backend serves cpu and cuda, got a tensor on {device}")


_cpu = cache(cpu_lane)
_cuda = cache(cuda_lane)
