"""Record launches of Triton kernels for a GPU that need not be there, and compile them.

A kernel's wrapper is called with tensors on the CPU while launches are recorded. A recorded launch
is then specialised as Triton does with the arguments of a call on a GPU, by the same rules. An
integer that equals 1 becomes a constant of the kernel, unless the kernel declares it otherwise. The
interpreter cannot do this: ``TRITON_INTERPRET`` must not be set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final
from unittest import mock

import torch
import triton
from attrs import frozen
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from arb_ternary_triton import arguments, choice
from arb_ternary_triton import launch as launching
from arb_ternary_triton.gpu import Gpu
from arb_ternary_triton.packing import check_packing

#: A100; RTX 3090; RTX 4090; H100 and H200; B200; RTX 5090; MI300X; MI350X; RX 7900 XTX.
GPUS: Final = {
    "sm_80": Gpu("sm_80", 108),
    "sm_86": Gpu("sm_86", 82),
    "sm_89": Gpu("sm_89", 128),
    "sm_90a": Gpu("sm_90", 132),
    "sm_100a": Gpu("sm_100", 148),
    "sm_120a": Gpu("sm_120", 170),
    "gfx942": Gpu("gfx942", 304),
    "gfx950": Gpu("gfx950", 256),
    "gfx1100": Gpu("gfx1100", 96),
}
TARGETS: Final = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_86": GPUTarget("cuda", 86, 32),
    "sm_89": GPUTarget("cuda", 89, 32),
    "sm_90a": GPUTarget("cuda", 90, 32),
    "sm_100a": GPUTarget("cuda", 100, 32),
    "sm_120a": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
    "gfx1100": GPUTarget("hip", "gfx1100", 32),
}
_TYPES: Final = {
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
}


@frozen
class Launch:
    """A recorded launch: the kernel, its arguments, compile-time constants and options."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    warps: int
    stages: int


@contextmanager
def recording(target: str) -> Iterator[list[Launch]]:
    """Record launches instead of running them, with the choices for the GPU of a target."""
    launches: list[Launch] = []
    replaced = {
        (launching, "_start"): lambda *launch: launches.append(Launch(*launch)),
        (launching, "gpu_of"): lambda _device: GPUS[target],
        (choice, "gpu_of"): lambda _device: GPUS[target],
        (choice, "fixed_choices"): lambda: True,
        (arguments, "serves"): lambda tensor: tensor.is_cpu,
    }
    with ExitStack() as patches:
        for (module, name), function in replaced.items():
            patches.enter_context(mock.patch.object(module, name, function))
        yield launches


def launches_of(call: Callable[[], object], target: str) -> list[Launch]:
    """Return what a call would launch on a GPU like the target.

    Raises:
        RuntimeError: Triton was imported for its interpreter.
    """
    if launching.INTERPRETED:
        raise RuntimeError(
            "kernels were made for the interpreter: unset TRITON_INTERPRET to compile them"
        )
    with recording(target) as launches:
        call()
    return launches


@frozen
class Specialised:
    """Key of a compiled kernel: launches with equal records share one.

    Attributes:
        kernel: the function under ``triton.jit``.
        signature: the type of each argument, ``constexpr`` for constants.
        constants: values of the constants.
        multiples: positions of the arguments that are known to be multiples of 16.
        warps: warps per program.
        stages: stages of the software pipeline.
    """

    kernel: Any
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    multiples: tuple[int, ...]
    warps: int
    stages: int

    @property
    def source(
        self,
    ) -> tuple[Any, dict[str, str], dict[str, Any], dict[tuple[int], list[list[object]]]]:
        """Arguments of Triton's ``ASTSource``."""
        attributes: dict[tuple[int], list[list[object]]] = {
            (place,): [["tt.divisibility", 16]] for place in self.multiples
        }
        return self.kernel, dict(self.signature), dict(self.constants), attributes

    @property
    def options(self) -> dict[str, Any]:
        """Options for the compiler, as :func:`arb_ternary_triton.launch.launch` gives them."""
        return {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": False}


def specialise(launch: Launch) -> Specialised:
    """Return the types and constants that Triton compiles a launch for."""
    signature: dict[str, str] = {}
    constants = dict(launch.constants)
    multiples: list[int] = []
    fixed = {p.name for p in launch.kernel.params if p.do_not_specialize}
    named = zip(launch.kernel.arg_names, launch.arguments, strict=False)
    for place, (name, value) in enumerate(named):
        if isinstance(value, Tensor):
            signature[name] = _TYPES[value.dtype]
            if value.data_ptr() % 16 == 0:
                multiples.append(place)
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif value == 1 and name not in fixed:
            signature[name] = "constexpr"
            constants[name] = 1
        else:
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and name not in fixed:
                multiples.append(place)
    signature |= dict.fromkeys(launch.constants, "constexpr")
    return Specialised(
        launch.kernel,
        tuple(signature.items()),
        tuple(constants.items()),
        tuple(multiples),
        launch.warps,
        launch.stages,
    )


def compile_launch(launch: Launch, target: str) -> Any:
    """Compile the kernel of a launch, and check it as a launch on a GPU would."""
    one = specialise(launch)
    built = triton.compile(ASTSource(*one.source), target=TARGETS[target], options=one.options)
    check_packing(built.asm["ttgir"])
    return built


class _TranslatedError(Exception):
    """Ends a compilation after the translation."""


class _Translated(ASTSource):
    """A source whose compilation ends once it is in Triton's intermediate language."""

    def make_ir(self, *arguments: Any, **named: Any) -> Any:
        super().make_ir(*arguments, **named)
        raise _TranslatedError


def translate(one: Specialised, target: str) -> None:
    """Check the types of a kernel by translating it into Triton's intermediate language.

    This takes hundredths of a second, and a compilation seconds.

    Raises:
        triton.compiler.CompilationError: the kernel is not well typed.
    """
    try:
        triton.compile(_Translated(*one.source), target=TARGETS[target], options=one.options)
    except _TranslatedError:
        return
