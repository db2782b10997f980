"""Specialise a recorded launch as Triton would: which arguments are constants or multiples of 16.

This does for a recorded launch what Triton does with the arguments of a call on a GPU, by the same
rules. An integer that equals 1 becomes a constant of the kernel, unless the kernel declares it
otherwise.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
from attrs import frozen
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from arb_ternary_triton.launch import Launch
from arb_ternary_triton.packing import check_packing

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


def compile_launch(launch: Launch, target: GPUTarget) -> Any:
    """Compile the kernel of a launch, and check it as a launch on a GPU would."""
    one = specialise(launch)
    built = triton.compile(ASTSource(*one.source), target=target, options=one.options)
    check_packing(built.asm["ttgir"])
    return built


class _TranslatedError(Exception):
    """Ends a compilation after the translation."""


class _Translated(ASTSource):  # type: ignore[misc]
    """A source whose compilation ends once it is in Triton's intermediate language."""

    def make_ir(self, *arguments: Any, **named: Any) -> Any:
        super().make_ir(*arguments, **named)
        raise _TranslatedError


def translate(one: Specialised, target: GPUTarget) -> None:
    """Check the types of a kernel by translating it into Triton's intermediate language.

    This takes hundredths of a second, and a compilation seconds.

    Raises:
        triton.compiler.CompilationError: the kernel is not well typed.
    """
    try:
        triton.compile(_Translated(*one.source), target=target, options=one.options)
    except _TranslatedError:
        return
