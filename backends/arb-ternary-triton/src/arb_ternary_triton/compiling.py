"""Compile the kernels for GPUs that need not be there, and report registers, spills and memory.

A kernel's wrapper is called with tensors on the CPU while launches are recorded. The kernels that a
GPU would run are then compiled for the target. The interpreter cannot do this: ``TRITON_INTERPRET``
must not be set.
"""

from __future__ import annotations

import argparse
import json
import math
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
from arb_ternary_triton.counting import per_element
from arb_ternary_triton.gpu import COMPILED
from arb_ternary_triton.launch import INTERPRETED, Launch, recording
from arb_ternary_triton.translation import TARGETS, compile_launch

#: Matrix and dot-product instructions, which show a kernel's arithmetic.
_INSTRUCTIONS: Final = re.compile(
    r"wgmma\.mma_async\.sync\.aligned\.\w+\.\w+\.\w+\.\w+|mma\.sync\.aligned\.m\w+(?:\.row\.col)?[.\w]*"
    r"|tcgen05\.mma[.:\w]*|dp4a\.\w+\.\w+|v_w?mf?ma_\w+"
)
#: Weight of the cases: 4096 x 4096, one exponent per 128 columns.
_SIZE: Final = 4096
_SHAPE: Final = WeightShape(_SIZE, _SIZE, 128)
_INT8: Final = torch.int8
_BF16: Final = torch.bfloat16
_INT32: Final = torch.int32

Call = Callable[[], object]


@frozen
class Compiled:
    """A compiled kernel.

    Attributes:
        case: name of the case.
        target: the GPU.
        kernel: the function's name.
        warps: warps per program.
        registers: registers per thread.
        spills: bytes of registers kept in memory for lack of space (on AMD's GPUs: registers).
        shared: bytes of shared memory per program.
        programs: programs of the launch.
        instructions: matrix and dot-product instructions in the code.
        per_element: instructions per weight or element, see :mod:`arb_ternary_triton.counting`;
            None where none are counted.
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
    per_element: float | None


def _weight(shape: WeightShape) -> tuple[Tensor, Tensor]:
    size = (shape.out_features, packed_columns(shape.in_features))
    packed = torch.full(size, 0x55, dtype=torch.uint8)
    exponent = torch.full((shape.out_features, shape.groups), -6, dtype=torch.int8)
    return packed, exponent


def _state(
    shape: WeightShape, scaled: torch.dtype | None = None, **others: Tensor | None
) -> VoteState:
    """Return the state of a weight, with a ``vote_scale`` of the dtype ``scaled``."""
    if scaled is not None:
        size = shape.out_features + shape.in_features
        others["magnitudes"] = torch.zeros(size)
        others["vote_scale"] = torch.zeros(size, dtype=scaled)
    packed, exponent = _weight(shape)
    zeros = torch.zeros((shape.out_features, shape.in_features), dtype=torch.int8)
    votes = layout.pack_votes(zeros, shape.vote_bits)
    limits = torch.tensor(VoteLimits(1024, 2))
    return new_state(shape, packed, exponent, votes, "triton", limits=limits, **others)


def _linear(
    terms: int, dtype: torch.dtype, shape: WeightShape = _SHAPE, *, biased: bool = False
) -> Call:
    def run() -> object:
        packed, exponent = _weight(shape)
        x = torch.zeros((terms, shape.in_features), dtype=dtype)
        scale = torch.ones(terms) if dtype is torch.int8 else None
        bias = torch.zeros(shape.out_features) if biased else None
        return products.linear(x, scale, packed, exponent, bias, shape, torch.bfloat16)

    return run


def _grad_input(terms: int, dtype: torch.dtype, shape: WeightShape = _SHAPE) -> Call:
    def run() -> object:
        packed, exponent = _weight(shape)
        grad = torch.zeros((terms, shape.out_features), dtype=dtype)
        scale = torch.ones(()) if dtype is torch.int8 else None
        return products.linear_grad_input(grad, scale, packed, exponent, shape, torch.bfloat16)

    return run


def _votes(
    terms: int,
    dtype: torch.dtype,
    scaled: torch.dtype | None,
    shape: WeightShape = _SHAPE,
    *,
    scored: bool = True,
) -> Call:
    def run() -> object:
        grad = torch.zeros((terms, shape.out_features), dtype=dtype)
        x = torch.zeros((terms, shape.in_features), dtype=dtype)
        scale = torch.ones(()) if dtype is torch.int8 else None
        cast = casting.cast_votes if scaled is None else casting.cast_scaled_votes
        state = _state(shape, scaled)
        return cast(grad, x, scale, state if scored else state._replace(exponent_votes=None))

    return run


def _flips(scaled: bool, shape: WeightShape = _SHAPE) -> Call:
    def run() -> object:
        state = _state(shape)
        if scaled:
            return flips.apply_scaled_votes(state, 32, 256, True)
        return flips.apply_votes(state, 32, 0)

    return run


def _lookup(scaled: bool, terms: int = 64, shape: WeightShape = _SHAPE) -> Call:
    def run() -> object:
        ids = torch.arange(terms) % shape.out_features
        grad = torch.zeros((terms, shape.in_features), dtype=torch.int8)
        if scaled:
            casting.embedding_scaled_votes(ids, grad, torch.ones(()), _state(shape, torch.float32))
        else:
            steps = torch.zeros((shape.out_features, shape.groups), dtype=torch.int32)
            state = _state(shape, correlation=steps.to(torch.int16), steps=steps)
            casting.embedding_votes(ids, grad, torch.ones(()), state)
        packed, exponent = _weight(shape)
        return products.embedding(ids, packed, exponent, shape, torch.bfloat16)

    return run


def _lookup_votes(
    dtype: torch.dtype, scaled: torch.dtype | None, shape: WeightShape, *, scored: bool
) -> Call:
    def run() -> None:
        ids = torch.arange(64) % shape.out_features
        grad = torch.zeros((64, shape.in_features), dtype=dtype)
        scale = torch.ones(()) if dtype is torch.int8 else None
        cast = casting.embedding_votes if scaled is None else casting.embedding_scaled_votes
        state = _state(shape, scaled)
        cast(ids, grad, scale, state if scored else state._replace(exponent_votes=None))

    return run


def _wide_weight() -> tuple[Tensor, Tensor]:
    """Return a weight whose exponents spread too far for 32 bits."""
    packed, exponent = _weight(_SHAPE)
    exponent[0, 0] = 10
    exponent[1, 1] = 10
    return packed, exponent


def _wide_linear() -> object:
    packed, exponent = _wide_weight()
    x = torch.zeros((64, _SIZE), dtype=torch.int8)
    bias = torch.zeros(_SIZE)
    return products.linear(x, torch.ones(64), packed, exponent, bias, _SHAPE, torch.float32)


def _wide_grad_input() -> object:
    packed, exponent = _wide_weight()
    grad = torch.zeros((64, _SIZE), dtype=torch.int8)
    return products.linear_grad_input(grad, torch.ones(()), packed, exponent, _SHAPE, torch.float32)


def _narrow(bits: int) -> Call:
    """Return a call for narrow accumulators: conversion of the layout, votes, flips."""

    def run() -> object:
        shape = WeightShape(_SIZE, _SIZE, 32, bits)
        state = _state(shape)
        casting.cast_votes(torch.zeros((64, _SIZE)), torch.zeros((64, _SIZE)), None, state)
        flips.apply_votes(state, 1, 1)
        return layout.unpack_votes(state.votes, shape)

    return run


def _small() -> object:
    """Call the kernels that visit every element once."""
    packed = layout.pack(torch.zeros((_SIZE, _SIZE), dtype=torch.int8))
    flips.apply_exponent_votes(_state(_SHAPE), 32, 2, 1)
    rows.quantize_gradient(torch.zeros((64, _SIZE), dtype=torch.bfloat16), 1, 2, 3)
    return layout.unpack(packed, _SHAPE)


def _wire() -> object:
    """Call the kernels for messages between ranks."""
    packed, _ = _weight(_SHAPE)
    for base in (3, 5, 15, 255):
        digits = wire.digits_to_bytes(torch.zeros(_SIZE, dtype=torch.int16), base)
        wire.add_digits_(torch.zeros(_SIZE, dtype=torch.int32), digits, base)
        wire.bytes_to_digits(digits, _SIZE, base)
    wire.sums_to_quanta(torch.zeros(_SIZE, dtype=torch.int16), 3, 5, (1, 2, 3), 0)
    wire.apply_flips_(packed, _SHAPE, torch.arange(8), torch.ones(8, dtype=torch.int8))
    return wire.flip_list(packed, packed, _SHAPE)


def _calls(terms: int, shape: WeightShape, integer: bool) -> dict[str, Call]:
    dtype = _INT8 if integer else _BF16
    scaled = torch.int32 if integer else torch.float32
    x = torch.zeros((terms, shape.in_features), dtype=_BF16)
    return {
        "linear": _linear(terms, dtype, shape),
        "linear_grad_input": _grad_input(terms, dtype, shape),
        "cast_votes": _votes(terms, dtype, None, shape),
        "cast_scaled_votes": _votes(terms, dtype, scaled, shape),
        "embedding_votes": _lookup(False, terms, shape),
        "embedding_scaled_votes": _lookup(True, terms, shape),
        "apply_votes": _flips(False, shape),
        "apply_scaled_votes": _flips(True, shape),
        "quantize_rows": lambda: rows.quantize_rows(x),
        "rms_norm_quantize": lambda: rows.rms_norm_quantize(x, 1e-6),
        "quantize_gradient": lambda: rows.quantize_gradient(x, 1, 2, 3),
    }


#: Ops of :func:`call_of`. The ops that vote for looked-up rows also call the lookup.
OPS: Final = tuple(_calls(1, _SHAPE, integer=True))


def call_of(op: str, terms: int, shape: WeightShape, integer: bool) -> Call:
    """Return a call of one of :data:`OPS` with operands of int8 or bfloat16."""
    return _calls(terms, shape, integer)[op]


def _quantize_rows() -> object:
    return rows.quantize_rows(torch.zeros((2048, _SIZE), dtype=_BF16))


def _rms_norm_quantize() -> object:
    return rows.rms_norm_quantize(torch.zeros((2048, _SIZE), dtype=_BF16), 1e-6)


#: Hot kernels: the name of a case, and a call whose first kernel takes most of the time.
CASES: Final[dict[str, Call]] = {
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
    "quantize_rows, M = 2048": _quantize_rows,
    "rms_norm_quantize, M = 2048": _rms_norm_quantize,
}
#: Other kernels: off the hot path, float32 operands, spreads that need 64 bits, accumulators of 4
#: and 2 bits.
OTHERS: Final[dict[str, Call]] = {
    "linear float32, M = 1": _linear(1, torch.float32),
    "linear float32, M = 64": _linear(64, torch.float32),
    "linear_grad_input float32, M = 64": _grad_input(64, torch.float32),
    "linear int8, a wide spread, M = 64": _wide_linear,
    "linear_grad_input int8, a wide spread, M = 64": _wide_grad_input,
    "embedding and its votes": _lookup(False),
    "embedding and its scaled votes": _lookup(True),
    "accumulators of 4 bits": _narrow(4),
    "accumulators of 2 bits": _narrow(2),
    "layout, exponents, gradients": _small,
    "votes and flips between ranks": _wire,
}


def _every_flip(shape: WeightShape) -> Call:
    """Return calls that apply votes with and without leak, carry and decay."""

    def run() -> None:
        states = [_state(shape)] * 2
        for leak in (0, 1):
            flips.apply_votes(states[0], 32, leak)
            flips.apply_together("apply_votes", states, [(32, leak)] * 2)
        for carry in (False, True):
            for decay in (0, 256):
                flips.apply_scaled_votes(states[0], 32, decay, carry)
                flips.apply_together("apply_scaled_votes", states, [(32, decay, carry)] * 2)
        flips.apply_together("apply_exponent_votes", states, [(32, 2, 1)] * 2)

    return run


def _every_row() -> None:
    """Quantise short and long rows, and rows of every float dtype."""
    for dtype in (_BF16, torch.float16, torch.float32):
        for columns in (256, _SIZE):
            x = torch.zeros((64, columns), dtype=dtype)
            rows.quantize_rows(x)
            rows.rms_norm_quantize(x, 1e-6)
            rows.quantize_gradient(x, 1, 2, 3)
            for count in (1, 2, 3):
                rows.quantize_several([x] * count, torch.ones(64), [(1, 2, 3, 4)] * count)


def lane() -> dict[str, Call]:
    """Return calls that have every kernel with every option that a call can ask for.

    Options are the operands, the numbers of rows that tables distinguish, exponents for 32 columns,
    for a block and for a row, a bias, the kinds of votes, what is learned, and the size of an
    accumulator.
    """
    calls = {**CASES, **OTHERS, "flips": _every_flip(_SHAPE), "rows": _every_row}
    for columns in (_SIZE - 1, _SIZE - 4):
        calls[f"flips, {columns} columns"] = _every_flip(WeightShape(_SIZE, columns, 32))
    for group in (32, _SIZE):
        shape = WeightShape(_SIZE, _SIZE, group)
        for dtype in (_INT8, _BF16, torch.float16, torch.float32):
            name = f"{dtype}, groups of {group}"
            for terms in (1, 16, 32, 64, 2048):
                biased = _linear(terms, dtype, shape, biased=True)
                calls[f"linear {name}, M = {terms}, bias"] = biased
                calls[f"linear_grad_input {name}, M = {terms}"] = _grad_input(terms, dtype, shape)
        for bits in (8, 4, 2):
            narrow = WeightShape(_SIZE, _SIZE, group, bits)
            calls[f"flips, {bits} bits, groups of {group}"] = _every_flip(narrow)
            for dtype, scaled in (
                (_INT8, None),
                (_BF16, None),
                (_INT8, _INT32),
                (_INT8, torch.float32),
                (_BF16, torch.float32),
            ):
                name = f"cast {dtype}, scale {scaled}, {bits} bits, groups of {group}"
                calls[name] = _votes(64, dtype, scaled, narrow)
                calls[f"{name}, not scored"] = _votes(64, dtype, scaled, narrow, scored=False)
        calls[f"lookup and correlation, groups of {group}"] = _lookup(False, 64, shape)
        for dtype in (_INT8, _BF16, torch.float32):
            for scaled in (None, torch.float32, *([_INT32] if dtype is _INT8 else [])):
                for scored in (False, True):
                    name = f"lookup {dtype}, scale {scaled}, scored {scored}, groups of {group}"
                    calls[name] = _lookup_votes(dtype, scaled, shape, scored=scored)
    return calls


def compile_first(case: str, call: Call, target: str) -> Compiled:
    """Compile the first kernel that a call would launch.

    Raises:
        RuntimeError: Triton was imported for its interpreter.
    """
    return compiled(case, launches_of(call, target)[0], target)


def compile_all(case: str, call: Call, target: str) -> list[Compiled]:
    """Compile every kernel that a call would launch, as :func:`compile_first`."""
    return [compiled(case, launch, target) for launch in launches_of(call, target)]


def launches_of(call: Call, target: str) -> list[Launch]:
    """Return what a call would launch on a GPU like the target.

    Raises:
        RuntimeError: Triton was imported for its interpreter.
    """
    if INTERPRETED:
        raise RuntimeError(
            "kernels were made for the interpreter: unset TRITON_INTERPRET to compile them"
        )
    with recording(COMPILED[target.removesuffix("a")]) as launches:
        call()
    return launches


def compiled(case: str, launch: Launch, target: str) -> Compiled:
    built = compile_launch(launch, TARGETS[target])
    if "cubin" in built.asm:
        text = built.asm["ptx"]
        registers, spills = _nvidia_registers(built.asm["cubin"])
    else:
        text = built.asm["amdgcn"]
        registers, spills = _amd_registers(text)
    return Compiled(
        case=case,
        target=target,
        kernel=launch.kernel.__name__,
        warps=launch.warps,
        registers=registers,
        spills=spills,
        shared=built.metadata.shared,
        programs=math.prod(launch.grid),
        instructions=tuple(sorted(set(_INSTRUCTIONS.findall(text)))),
        per_element=per_element(launch, built),
    )


def _nvidia_registers(cubin: bytes) -> tuple[int, int]:
    """Return registers and bytes of stack per thread.

    The kernels have no arrays of their own, so the stack holds only spilled registers.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", report)
    if found is None:
        raise RuntimeError(f"cuobjdump does not say what a kernel uses: {report}")
    return int(found[1]), int(found[2])


def _amd_registers(text: str) -> tuple[int, int]:
    """Return registers and spilled registers per thread."""
    counts = dict(re.findall(r"\.(vgpr_count|vgpr_spill_count):\s+(\d+)", text))
    return int(counts["vgpr_count"]), int(counts["vgpr_spill_count"])


_HEAD: Final = (
    "| kernel | target | warps | registers | spills | shared memory | per weight | instructions "
    "|\n|---|---|---|---|---|---|---|---|"
)


def _row(one: Compiled) -> str:
    count = "-" if one.per_element is None else f"{one.per_element:.2f}"
    names = " ".join(f"`{name}`" for name in one.instructions) or "-"
    return (
        f"| {one.case} | {one.target} | {one.warps} | {one.registers} | {one.spills} | "
        f"{one.shared} | {count} | {names} |"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m arb_ternary_triton.compiling", description=__doc__
    )
    parser.add_argument("--target", action="append", choices=[*TARGETS], help="default: all")
    parser.add_argument("--case", action="append", choices=[*CASES], help="default: all")
    parser.add_argument(
        "--call",
        nargs=6,
        metavar=("OP", "M", "N", "K", "G", "OPERANDS"),
        help="compile this call instead of cases",
    )
    parser.add_argument(
        "--others",
        action="store_true",
        help="compile every kernel of the cases off the hot path instead",
    )
    parser.add_argument(
        "--json", action="store_true", help="print JSON instead of a Markdown table"
    )
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Compile cases for targets and print a table or JSON."""
    chosen = _parser().parse_args(arguments)
    if chosen.others:
        calls = OTHERS
    elif chosen.call:
        op, terms, *weight, operands = chosen.call
        shape = WeightShape(*map(int, weight))
        calls = {op: call_of(op, int(terms), shape, operands == "int8")}
    else:
        calls = {case: CASES[case] for case in chosen.case or CASES}

    found = []
    if not chosen.json:
        print(_HEAD)
    for case, call in calls.items():
        for target in chosen.target or TARGETS:
            if chosen.others:
                kernels = compile_all(case, call, target)
            else:
                kernels = [compile_first(case, call, target)]
            found += kernels
            if not chosen.json:
                print("\n".join(map(_row, kernels)), flush=True)
    if chosen.json:
        print(json.dumps([asdict(one) for one in found]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
