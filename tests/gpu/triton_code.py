"""Compile the kernels for GPUs that need not be there, and report registers, spills and memory.

``python tests/gpu/triton_code.py`` prints the table of the report for the hot kernels. It describes
compiled code and measures nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, Final

import torch
from machine_code import (
    Compiled,
    amd_registers,
    disassemble,
    matrix_instructions,
    nvidia_registers,
    parse,
    table,
)
from torch import Tensor
from triton_launches import TARGETS, Launch, compile_launch, launches_of

from arb_ternary.backends.protocol import WeightShape
from arb_ternary.backends.vote_state import VoteLimits, VoteState, new_state
from arb_ternary_triton import casting, flips, layout, products, rows, wire
from arb_ternary_triton.arguments import BLOCK, LANES, packed_columns

#: Weight of the cases: 4096 x 4096, one exponent per 128 columns.
_SIZE: Final = 4096
_SHAPE: Final = WeightShape(_SIZE, _SIZE, 128)
_INT8: Final = torch.int8
_BF16: Final = torch.bfloat16
_INT32: Final = torch.int32

Call = Callable[[], object]


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
        wire.add_digits_(torch.zeros(_SIZE, dtype=torch.int16), digits, base)
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


def every_option() -> dict[str, Call]:
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
    """Compile the first kernel that a call would launch."""
    return compiled(case, launches_of(call, target)[0], target)


def compile_all(case: str, call: Call, target: str) -> list[Compiled]:
    """Compile every kernel that a call would launch."""
    return [compiled(case, launch, target) for launch in launches_of(call, target)]


def compiled(case: str, launch: Launch, target: str) -> Compiled:
    """Compile the kernel of a launch."""
    built = compile_launch(launch, target)
    nvidia = "cubin" in built.asm
    if nvidia:
        text = built.asm["ptx"]
        registers, spills = nvidia_registers(built.asm["cubin"])
    else:
        text = built.asm["amdgcn"]
        registers, spills = amd_registers(text)
    warp = built.metadata.target.warp_size
    return Compiled(
        case=case,
        target=target,
        kernel=launch.kernel.__name__,
        threads=launch.warps * warp,
        registers=registers,
        spills=spills,
        shared=built.metadata.shared,
        instructions=matrix_instructions(text),
        per_element=_per_element(launch, built),
    )


def _per_element(launch: Launch, built: Any) -> float | None:
    """Return the instructions per weight of a product, or per element of a kernel of votes.

    A kernel that sums has one large loop, whose instructions are divided by the weights that a
    thread decodes in one turn. Of a kernel that casts votes, it is the shortest way to that loop
    and from it to the end, divided by the elements of the tile that a thread has; so is the
    shortest way through a kernel that flips. That is the way of a tile without NaN, whose shifts
    are in their usual range, and where no accumulator crosses its threshold.

    Returns:
        None for a kernel for which no count is defined.
    """
    sizes = launch.constants
    kernel = launch.kernel.__name__
    elements = {
        "row_kernel": lambda: sizes["OUTPUTS"] * sizes["BLOCKS"] * BLOCK,
        "linear_kernel": lambda: sizes["OUTPUTS"] * sizes["BLOCKS"] * BLOCK,
        "grad_input_kernel": lambda: sizes["OUTPUTS"] * sizes["BLOCKS"] * LANES,
        "product_votes_kernel": lambda: sizes["ROWS"] * sizes["COLUMNS"],
        "flip_kernel": lambda: sizes["ROWS"] * sizes["COLUMNS"],
    }.get(kernel)
    if elements is None:
        return None
    nvidia = "cubin" in built.asm
    text = disassemble(built.asm["cubin"]) if nvidia else built.asm["amdgcn"]
    code = parse(text)
    loop = code.loop()
    counted = len(loop)
    if kernel == "product_votes_kernel":
        counted = code.shortest(0, loop.start) + code.shortest(loop.stop)
    elif kernel == "flip_kernel":
        counted = code.shortest()
    threads = launch.warps * built.metadata.target.warp_size
    return float(counted * threads / elements())


def main() -> None:
    """Compile the hot kernels for targets and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", action="append", choices=[*TARGETS], help="default: all")
    targets = parser.parse_args().target or TARGETS
    rows: list[list[object]] = []
    for case, call in CASES.items():
        for target in targets:
            one = compile_first(case, call, target)
            count = "-" if one.per_element is None else f"{one.per_element:.2f}"
            names = " ".join(f"`{name}`" for name in one.instructions) or "-"
            warps = one.threads // TARGETS[target].warp_size
            memory = (warps, one.registers, one.spills, one.shared)
            rows.append([case, target, *memory, count, names])
    titles = "kernel | target | warps | registers | spills | shared memory | per weight"
    print(table(f"{titles} | instructions", rows))


if __name__ == "__main__":
    main()
