"""Compiling the kernels for GPUs that are not there, and what the result says: registers, spills,
shared memory.

A kernel's wrapper is called with tensors on the CPU while launches are recorded; what would have
been started on a GPU is compiled for the target instead. Not in the interpreter:
``TRITON_INTERPRET`` must not be set.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Final

import torch
import triton
from attrs import asdict, frozen
from torch import Tensor

from arb_ternary.backends.protocol import WeightShape
from arb_ternary.backends.vote_state import VoteLimits, VoteState, new_state
from arb_ternary_triton import casting, flips, layout, products, rows, wire
from arb_ternary_triton.arguments import packed_columns
from arb_ternary_triton.gpu import KNOWN
from arb_ternary_triton.launch import INTERPRETED, Launch, recording
from arb_ternary_triton.translation import TARGETS, compile_launch

#: Matrix and dot-product instructions, by which a kernel's arithmetic is known.
_INSTRUCTIONS: Final = re.compile(
    r"wgmma\.mma_async\.sync\.aligned\.\w+\.\w+\.\w+\.\w+|mma\.sync\.aligned\.m\w+(?:\.row\.col)?[.\w]*"
    r"|dp4a\.\w+\.\w+|v_mfma_\w+"
)
#: Weight of the cases: 4096 x 4096, one exponent for 128 columns.
_SIZE: Final = 4096


@frozen
class Compiled:
    """A compiled kernel.

    Attributes:
        case: what it does.
        target: the GPU.
        kernel: the function's name.
        warps: of a program.
        registers: a thread.
        spills: bytes of registers kept in memory for want of space (on gfx942: registers).
        shared: bytes of shared memory a program.
        programs: of the launch.
        instructions: matrix and dot-product instructions in it.
    """

    case: str
    target: str
    kernel: str
    warps: int
    registers: int
    spills: int
    shared: int
    programs: int
    instructions: tuple[str, ...]


_SHAPE: Final = WeightShape(_SIZE, _SIZE, 128)


def _weight(shape: WeightShape) -> tuple[Tensor, Tensor]:
    packed = torch.full(
        (shape.out_features, packed_columns(shape.in_features)), 0x55, dtype=torch.uint8
    )
    return packed, torch.full((shape.out_features, shape.groups), -6, dtype=torch.int8)


def _state(shape: WeightShape, scaled: torch.dtype | None = None, **others: Tensor) -> VoteState:
    """The state of such a weight, with a ``vote_scale`` of the dtype ``scaled``."""
    size = shape.out_features + shape.in_features
    if scaled is not None:
        others |= {"magnitudes": torch.zeros(size), "vote_scale": torch.zeros(size, dtype=scaled)}
    votes = layout.pack_votes(
        torch.zeros((shape.out_features, shape.in_features), dtype=torch.int8), shape.vote_bits
    )
    limits = torch.tensor(VoteLimits(1024, 2))
    return new_state(shape, *_weight(shape), votes, "triton", limits=limits, **others)


def _linear(terms: int, dtype: torch.dtype, shape: WeightShape = _SHAPE) -> Callable[[], object]:
    def run() -> object:
        packed, exponent = _weight(shape)
        x = torch.zeros((terms, shape.in_features), dtype=dtype)
        scale = torch.ones(terms) if dtype is torch.int8 else None
        return products.linear(x, scale, packed, exponent, None, shape, torch.bfloat16)

    return run


def _grad_input(
    terms: int, dtype: torch.dtype, shape: WeightShape = _SHAPE
) -> Callable[[], object]:
    def run() -> object:
        packed, exponent = _weight(shape)
        grad = torch.zeros((terms, shape.out_features), dtype=dtype)
        scale = torch.ones(()) if dtype is torch.int8 else None
        return products.linear_grad_input(grad, scale, packed, exponent, shape, torch.bfloat16)

    return run


def _votes(
    terms: int, dtype: torch.dtype, scaled: torch.dtype | None, shape: WeightShape = _SHAPE
) -> Callable[[], object]:
    def run() -> object:
        rows = shape.out_features
        columns = shape.in_features
        operands = (
            torch.zeros((terms, rows), dtype=dtype),
            torch.zeros((terms, columns), dtype=dtype),
        )
        scale = torch.ones(()) if dtype is torch.int8 else None
        cast = casting.cast_votes if scaled is None else casting.cast_scaled_votes
        return cast(*operands, scale, _state(shape, scaled))

    return run


def _flips(scaled: bool, shape: WeightShape = _SHAPE) -> Callable[[], object]:
    def run() -> object:
        state = _state(shape)
        return (
            flips.apply_scaled_votes(state, 32, 256, True)
            if scaled
            else flips.apply_votes(state, 32, 0)
        )

    return run


def _lookup(scaled: bool, terms: int = 64, shape: WeightShape = _SHAPE) -> Callable[[], object]:
    def run() -> object:
        ids = torch.arange(terms) % shape.out_features
        grad = torch.zeros((terms, shape.in_features), dtype=torch.int8)
        wide = torch.zeros((shape.out_features, shape.groups), dtype=torch.int32)
        if scaled:
            casting.embedding_scaled_votes(ids, grad, torch.ones(()), _state(shape, torch.float32))
        else:
            state = _state(shape, correlation=wide.to(torch.int16), steps=wide)
            casting.embedding_votes(ids, grad, torch.ones(()), state)
        return products.embedding(ids, *_weight(shape), shape, torch.bfloat16)

    return run


def _spread(product: Callable[..., Tensor], scale: Tensor) -> Callable[[], object]:
    """A product whose exponents spread too far for 32 bits."""

    def run() -> object:
        packed, exponent = _weight(_SHAPE)
        exponent[0, 0] = 10
        exponent[1, 1] = 10
        rows = (torch.zeros((64, _SIZE), dtype=torch.int8), scale, packed, exponent)
        bias = (torch.zeros(_SIZE),) if product is products.linear else ()
        return product(*rows, *bias, _SHAPE, torch.float32)

    return run


def _narrow(bits: int) -> Callable[[], object]:
    """Accumulators of fewer bits: to and from their layout, votes, flips."""

    def run() -> object:
        shape = WeightShape(_SIZE, _SIZE, 32, bits)
        state = _state(shape)
        casting.cast_votes(torch.zeros((64, _SIZE)), torch.zeros((64, _SIZE)), None, state)
        flips.apply_votes(state, 1, 1)
        return layout.unpack_votes(state.votes, shape)

    return run


def _small() -> object:
    """What visits every element once."""
    packed = layout.pack(torch.zeros((_SIZE, _SIZE), dtype=torch.int8))
    flips.apply_exponent_votes(_state(_SHAPE), 32, 2, 1)
    rows.quantize_gradient(torch.zeros((64, _SIZE), dtype=torch.bfloat16), 1, 2, 3)
    return layout.unpack(packed, _SHAPE)


def _wire() -> object:
    """What travels between ranks."""
    packed, _ = _weight(_SHAPE)
    for base in (3, 5, 15, 255):
        digits = wire.digits_to_bytes(torch.zeros(_SIZE, dtype=torch.int16), base)
        wire.add_digits_(torch.zeros(_SIZE, dtype=torch.int32), digits, base)
        wire.bytes_to_digits(digits, _SIZE, base)
    wire.sums_to_quanta(torch.zeros(_SIZE, dtype=torch.int16), 3, 5, (1, 2, 3), 0)
    wire.apply_flips_(packed, _SHAPE, torch.arange(8), torch.ones(8, dtype=torch.int8))
    return wire.flip_list(packed, packed, _SHAPE)


def call_of(op: str, terms: int, shape: WeightShape, integer: bool) -> Callable[[], object]:
    """A call of an op on a shape, with operands of int8 or bfloat16, for :func:`compile_call`; see
    :data:`OPS`.
    """
    dtype = torch.int8 if integer else torch.bfloat16
    x = torch.zeros((terms, shape.in_features), dtype=torch.bfloat16)
    calls: dict[str, Callable[[], object]] = {
        "linear": _linear(terms, dtype, shape),
        "linear_grad_input": _grad_input(terms, dtype, shape),
        "cast_votes": _votes(terms, dtype, None, shape),
        "cast_scaled_votes": _votes(terms, dtype, torch.int32 if integer else torch.float32, shape),
        "embedding_votes": _lookup(False, terms, shape),
        "embedding_scaled_votes": _lookup(True, terms, shape),
        "apply_votes": _flips(False, shape),
        "apply_scaled_votes": _flips(True, shape),
        "quantize_rows": lambda: rows.quantize_rows(x),
        "rms_norm_quantize": lambda: rows.rms_norm_quantize(x, 1e-6),
        "quantize_gradient": lambda: rows.quantize_gradient(x, 1, 2, 3),
    }
    return calls[op]


#: Ops of :func:`call_of`; those of a lookup come with the lookup itself.
OPS: Final = (
    "linear",
    "linear_grad_input",
    "cast_votes",
    "cast_scaled_votes",
    "embedding_votes",
    "embedding_scaled_votes",
    "apply_votes",
    "apply_scaled_votes",
    "quantize_rows",
    "rms_norm_quantize",
    "quantize_gradient",
)
_INT8 = torch.int8
_BF16 = torch.bfloat16
#: What is compiled: a name, and a call whose first kernel is the one that takes the time.
CASES: Final[dict[str, Callable[[], object]]] = {
    "linear int8, M = 1": _linear(1, _INT8),
    "linear bf16, M = 1": _linear(1, _BF16),
    "linear int8, M = 16": _linear(16, _INT8),
    "linear int8, M = 64": _linear(64, _INT8),
    "linear int8, M = 2048": _linear(2048, _INT8),
    "linear bf16, M = 2048": _linear(2048, _BF16),
    "linear_grad_input int8, M = 16": _grad_input(16, _INT8),
    "linear_grad_input int8, M = 2048": _grad_input(2048, _INT8),
    "linear_grad_input bf16, M = 2048": _grad_input(2048, _BF16),
    "cast_votes int8, M = 2048": _votes(2048, _INT8, None),
    "cast_votes bf16, M = 2048": _votes(2048, _BF16, None),
    "cast_scaled_votes int8, by shifts, M = 2048": _votes(2048, _INT8, torch.int32),
    "cast_scaled_votes int8, by factors, M = 2048": _votes(2048, _INT8, torch.float32),
    "cast_scaled_votes bf16, by factors, M = 2048": _votes(2048, _BF16, torch.float32),
    "apply_votes": _flips(False),
    "apply_scaled_votes": _flips(True),
    "quantize_rows, M = 2048": lambda: rows.quantize_rows(torch.zeros((2048, _SIZE), dtype=_BF16)),
    "rms_norm_quantize, M = 2048": lambda: rows.rms_norm_quantize(
        torch.zeros((2048, _SIZE), dtype=_BF16), 1e-6
    ),
}


# : The rest: kernels off the hot path, operands in float32, spreads that need 64 bits, accumulators
# of 4 and 2 bits.
OTHERS: Final[dict[str, Callable[[], object]]] = {
    "linear float32, M = 1": _linear(1, torch.float32),
    "linear float32, M = 64": _linear(64, torch.float32),
    "linear_grad_input float32, M = 64": _grad_input(64, torch.float32),
    "linear int8, a wide spread, M = 64": _spread(products.linear, torch.ones(64)),
    "linear_grad_input int8, a wide spread, M = 64": _spread(
        products.linear_grad_input, torch.ones(())
    ),
    "embedding and its votes": _lookup(False),
    "embedding and its scaled votes": _lookup(True),
    "accumulators of 4 bits": _narrow(4),
    "accumulators of 2 bits": _narrow(2),
    "layout, exponents, gradients": _small,
    "votes and flips between ranks": _wire,
}


def compile_case(case: str, target: str) -> Compiled:
    """Compile the kernel of a case for a target.

    Raises:
        RuntimeError: Triton was imported for its interpreter.
    """
    return compile_call(case, CASES[case], target)


def compile_call(case: str, call: Callable[[], object], target: str) -> Compiled:
    """Compile the first kernel that a call would start, as :func:`compile_case`."""
    return _compiled(case, launches_of(call, target)[0], target)


def compile_rest(case: str, call: Callable[[], object], target: str) -> list[Compiled]:
    """Compile every kernel that a call would start."""
    return [_compiled(case, launch, target) for launch in launches_of(call, target)]


def launches_of(call: Callable[[], object], target: str) -> list[Launch]:
    """What a call would start on a GPU like the target.

    Raises:
        RuntimeError: as :func:`compile_case`.
    """
    if INTERPRETED:
        raise RuntimeError(
            "kernels were made for the interpreter: unset TRITON_INTERPRET to compile them"
        )
    with recording(KNOWN[target.removesuffix("a")]) as launches:
        call()
    return launches


def _compiled(case: str, launch: Launch, target: str) -> Compiled:
    built = compile_launch(launch, TARGETS[target])
    text = built.asm["ptx"] if "ptx" in built.asm else built.asm["amdgcn"]
    registers, spills = _resources(built.asm["cubin"]) if "cubin" in built.asm else _amd(text)
    programs = 1
    for size in launch.grid:
        programs *= size
    return Compiled(
        case=case,
        target=target,
        kernel=launch.kernel.__name__,
        warps=launch.warps,
        registers=registers,
        spills=spills,
        shared=built.metadata.shared,
        programs=programs,
        instructions=tuple(sorted(set(_INSTRUCTIONS.findall(text)))),
    )


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of stack a thread; the kernels have no arrays of their own, so what is
    there was spilled.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    if found is None:
        raise RuntimeError(f"cuobjdump does not say what a kernel uses: {said}")
    return int(found[1]), int(found[2])


def _amd(text: str) -> tuple[int, int]:
    found = {
        key: int(value)
        for key, value in re.findall(r"\.(vgpr_count|vgpr_spill_count):\s+(\d+)", text)
    }
    return found["vgpr_count"], found["vgpr_spill_count"]


_HEAD: Final = (
    "| kernel | target | warps | registers | spills | shared memory | instructions "
    "|\n|---|---|---|---|---|---|---|"
)


def _row(one: Compiled) -> str:
    names = " ".join(f"`{name}`" for name in one.instructions) or "-"
    return (
        f"| {one.case} | {one.target} | {one.warps} | {one.registers} | {one.spills} | "
        f"{one.shared} | {names} |"
    )


def main(arguments: list[str] | None = None) -> int:
    """``python -m arb_ternary_triton.compiling``: compile cases for targets, print a table or
    JSON.
    """
    parser = argparse.ArgumentParser(
        prog="python -m arb_ternary_triton.compiling", description=__doc__
    )
    parser.add_argument(
        "--target", action="append", choices=[*TARGETS], help="all of them if not given"
    )
    parser.add_argument(
        "--case", action="append", choices=[*CASES], help="all of them if not given"
    )
    parser.add_argument(
        "--call", nargs=6, metavar=("OP", "M", "N", "K", "G", "OPERANDS"), help="this call instead"
    )
    parser.add_argument(
        "--others", action="store_true", help="every kernel of the cases off the hot path instead"
    )
    parser.add_argument(
        "--json", action="store_true", help="print JSON instead of a Markdown table"
    )
    chosen = parser.parse_args(arguments)
    found = []
    if not chosen.json:
        print(_HEAD)
    calls = {case: CASES[case] for case in chosen.case or CASES}
    if chosen.call:
        op, *sizes, operands = chosen.call
        terms, *of_weight = map(int, sizes)
        calls = {op: call_of(op, terms, WeightShape(*of_weight), operands == "int8")}
    for case, call in (OTHERS if chosen.others else calls).items():
        for target in chosen.target or TARGETS:
            some = (
                compile_rest(case, call, target)
                if chosen.others
                else [compile_call(case, call, target)]
            )
            found += some
            if not chosen.json:
                print("\n".join(map(_row, some)), flush=True)
    if chosen.json:
        print(json.dumps([asdict(one) for one in found]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
