"""A recorded launch as Triton's compiler takes it: which arguments are constants, which are
multiples of 16.

What Triton does with the arguments of a call on a GPU is done here for one that is only recorded,
by the same rules: an integer that equals 1 becomes a constant of the kernel, unless the kernel is
declared otherwise.
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

TARGETS: Final = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90a": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
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
    """What a launch is compiled for. Launches that are equal here share a compiled kernel.

    Attributes:
        kernel: the function under ``triton.jit``.
        signature: the type of each argument, ``constexpr`` for constants.
        constants: their values.
        multiples: places of the arguments that are known to be multiples of 16.
        warps: of a program.
        stages: of the software pipeline.
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
        """The arguments of Triton's ``ASTSource``."""
        attributes: dict[tuple[int], list[list[object]]] = {
            (place,): [["tt.divisibility", 16]] for place in self.multiples
        }
        return self.kernel, dict(self.signature), dict(self.constants), attributes

    @property
    def options(self) -> dict[str, Any]:
        """Options of the compiler, as :func:`arb_ternary_triton.launch.launch` gives them."""
        return {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": False}


def specialise(launch: Launch) -> Specialised:
    """What Triton makes of the arguments of a launch."""
    signature: dict[str, str] = {}
    constants = dict(launch.constants)
    multiples: list[int] = []
    fixed = {p.name for p in launch.kernel.params if p.do_not_specialize}
    for place, (name, value) in enumerate(
        zip(launch.kernel.arg_names, launch.arguments, strict=False)
    ):
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
    """The compiled kernel of a launch."""
    one = specialise(launch)
    return triton.compile(ASTSource(*one.source), target=target, options=one.options)


class _TranslatedError(Exception):
    """The source was translated: what follows is not wanted."""


class _Translated(ASTSource):  # type: ignore[misc]
    """A source that ends the compilation once it is in Triton's intermediate language."""

    def make_ir(self, *arguments: Any, **named: Any) -> Any:
        super().make_ir(*arguments, **named)
        raise _TranslatedError


def translate(one: Specialised, target: GPUTarget) -> None:
    """Check the types of a kernel: translate it into Triton's intermediate language and leave it
    there.

    It takes some hundredths of a second where a compilation takes seconds.

    Raises:
        triton.compiler.CompilationError: the kernel is not well typed.
    """
    try:
        triton.compile(_Translated(*one.source), target=target, options=one.options)
    except _TranslatedError:
        return
