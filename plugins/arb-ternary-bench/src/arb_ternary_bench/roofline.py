"""The least that an op moves and computes, and the least time that it takes on a GPU.

The floor of a call is the larger of its bytes over the memory bandwidth and its operations over the
peak of the units that compute them, both from the vendor's data sheet. A further bound is how many
programs of a kernel fit on a multiprocessor, which follows from the registers and the shared memory
of the compiled code.
"""

from __future__ import annotations

from typing import Final

from attrs import frozen

from arb_ternary.backends.protocol import WeightShape


@frozen
class Gpu:
    """Limits of a GPU, dense, from its data sheet.

    Attributes:
        bandwidth: bytes per second.
        int8: operations per second on int8 tensor cores.
        bf16: operations per second on bfloat16 tensor cores.
        multiprocessors: number of multiprocessors.
        registers: registers per multiprocessor, 32 bits each.
        shared: bytes of shared memory per multiprocessor.
        warps: most warps per multiprocessor.
    """

    name: str
    bandwidth: float
    int8: float
    bf16: float
    multiprocessors: int = 132
    registers: int = 65536
    shared: int = 228 * 1024
    warps: int = 64


#: SXM modules.
GPUS: Final = (Gpu("H100", 3.35e12, 1979e12, 989e12), Gpu("H200", 4.8e12, 1979e12, 989e12))

#: Threads per warp. Registers are allocated per warp in units of 256. The system reserves some
#: shared memory.
_THREADS: Final = 32
_REGISTER_UNIT: Final = 256
_RESERVED_SHARED: Final = 1024
#: Most programs per multiprocessor.
_PROGRAMS: Final = 32


@frozen
class Work:
    """Least bytes to and from memory of one call, its operations, and whether they are int8."""

    bytes_moved: int
    operations: int
    integer: bool

    def floor(self, gpu: Gpu) -> float:
        """Return the least seconds of a call."""
        peak = gpu.int8 if self.integer else gpu.bf16
        return max(self.bytes_moved / gpu.bandwidth, self.operations / peak)

    def bound(self, gpu: Gpu) -> str:
        """Return what sets the floor: ``memory`` or ``arithmetic``."""
        peak = gpu.int8 if self.integer else gpu.bf16
        moving = self.bytes_moved / gpu.bandwidth
        return "memory" if moving >= self.operations / peak else "arithmetic"


def _linear(m: int, shape: WeightShape, size: int) -> tuple[int, int]:
    scales = 4 * m if size == 1 else 0
    operands = m * shape.in_features * size + scales + _weight(shape)
    return operands + 2 * m * shape.out_features, _product(m, shape)


def _grad_input(m: int, shape: WeightShape, size: int) -> tuple[int, int]:
    operands = m * shape.out_features * size + _weight(shape)
    return operands + 2 * m * shape.in_features, _product(m, shape)


def _cast_votes(m: int, shape: WeightShape, size: int) -> tuple[int, int]:
    operands = m * (shape.out_features + shape.in_features) * size
    sums = 8 * (shape.out_features + shape.in_features) + 2 * shape.out_features * shape.groups
    return operands + _trits(shape) + 2 * _votes(shape) + sums, _product(m, shape)


def _apply_votes(_m: int, shape: WeightShape, _size: int) -> tuple[int, int]:
    return _votes(shape), 0


def _quantize_rows(m: int, shape: WeightShape, _size: int) -> tuple[int, int]:
    return m * shape.in_features * 3 + 4 * m, 0


def _product(m: int, shape: WeightShape) -> int:
    return 2 * m * shape.out_features * shape.in_features


def _trits(shape: WeightShape) -> int:
    return shape.out_features * -(-shape.in_features // 4)


def _weight(shape: WeightShape) -> int:
    return _trits(shape) + shape.out_features * shape.groups


def _votes(shape: WeightShape) -> int:
    return shape.out_features * -(-shape.in_features * shape.vote_bits // 8)


_WORK: Final = {
    "linear": _linear,
    "linear_grad_input": _grad_input,
    "cast_votes": _cast_votes,
    "apply_votes": _apply_votes,
    "quantize_rows": _quantize_rows,
}
#: Ops that the model knows.
OPS: Final = tuple(_WORK)


def work(op: str, rows: int, shape: WeightShape, *, integer: bool = True) -> Work:
    """Return the least work of ``op`` on ``rows`` rows of activations.

    Every operand is read once and every result written once: packed trits at 2 bits and their
    exponents, accumulators, int8 or bfloat16 activations and gradients, bfloat16 results.
    ``apply_votes`` reads every accumulator; crossings, which are few, are left out.

    Args:
        op: one of :data:`OPS`.
        rows: ``M``.
        shape: of the weight.
        integer: int8 operands on int8 units; otherwise bfloat16.
    """
    moved, operations = _WORK[op](rows, shape, 1 if integer else 2)
    return Work(moved, operations, integer)


@frozen
class Occupancy:
    """How many programs of a kernel a multiprocessor holds, and what limits them.

    Attributes:
        programs: programs that fit on a multiprocessor.
        warps: warps of all of them.
        limit: ``registers``, ``shared memory``, ``warps`` or ``programs``.
        waves: programs of the launch over those that the device holds at a time.
    """

    programs: int
    warps: int
    limit: str
    waves: float


def occupancy(gpu: Gpu, *, registers: int, shared: int, warps: int, programs: int) -> Occupancy:
    """Return the occupancy of a compiled kernel.

    Args:
        gpu: the device.
        registers: registers per thread.
        shared: bytes of shared memory per program.
        warps: warps per program.
        programs: programs of the launch.
    """
    per_warp = -(-registers * _THREADS // _REGISTER_UNIT) * _REGISTER_UNIT
    fits = {
        "registers": gpu.registers // max(1, per_warp) // warps,
        "shared memory": gpu.shared // (shared + _RESERVED_SHARED),
        "warps": gpu.warps // warps,
        "programs": _PROGRAMS,
    }
    limit = min(fits, key=fits.__getitem__)
    held = fits[limit]
    return Occupancy(held, held * warps, limit, programs / max(1, held * gpu.multiprocessors))
