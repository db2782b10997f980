"""Predict the time of products on GPUs that are not there, from counted instructions.

``python -m arb_ternary_triton.predicting`` prints a table. A call takes at least as long as its
bytes at the bandwidth, its products at the peak of the matrix units, and its decoding at one
instruction per lane and clock. The prediction is the longest of these: a model, not a measurement.
"""

from __future__ import annotations

import sys
from typing import Final

from attrs import frozen

from arb_ternary_triton.compiling import CASES, compile_first, launches_of

#: Weight of the cases: 4096 x 4096, two bits per weight and one exponent byte per 128 weights.
_SIZE: Final = 4096
_WEIGHT_BYTES: Final = _SIZE * _SIZE // 4 + _SIZE * _SIZE // 128


@frozen
class _Peak:
    """Peak rates of a GPU, from its data sheet.

    Attributes:
        name: name of the GPU.
        lanes: instructions per second, of all lanes together.
        bandwidth: bytes per second.
        operations: int8 operations per second.
    """

    name: str
    lanes: float
    bandwidth: float
    operations: float


#: By target: multiprocessors x lanes x clock, bandwidth, dense int8.
_PEAKS: Final = {
    "sm_90a": _Peak("H100", 132 * 128 * 1.755e9, 3.35e12, 1979e12),
    "sm_89": _Peak("RTX 4090", 128 * 128 * 2.52e9, 1.008e12, 661e12),
    "gfx942": _Peak("MI300X", 304 * 64 * 2.1e9, 5.3e12, 2615e12),
}
#: Cases, with their rows of activations.
_CASES: Final = {
    "linear int8, M = 1": 1,
    "linear int8, M = 16": 16,
    "linear int8, M = 64": 64,
    "linear int8, M = 2048": 2048,
    "linear_grad_input int8, M = 16": 16,
    "linear_grad_input int8, M = 2048": 2048,
}


def predicted(case: str, rows: int, target: str) -> tuple[float, float, float]:
    """Return the seconds of a case's bytes, of its products and of its decoding."""
    peak = _PEAKS[target]
    compiled = compile_first(case, CASES[case], target)
    constants = launches_of(CASES[case], target)[0].constants
    if compiled.per_element is None:
        raise RuntimeError(f"{case}: no instructions are counted for this kernel")
    # Each tile of rows decodes the weight once more.
    times = -(-rows // constants.get("ROWS", 1))
    moved = _WEIGHT_BYTES + 3 * rows * _SIZE
    decoding = compiled.per_element * _SIZE * _SIZE * times / peak.lanes
    return moved / peak.bandwidth, 2 * rows * _SIZE * _SIZE / peak.operations, decoding


def main() -> int:
    """Print the table, in microseconds."""
    print("| kernel | GPU | bytes | products | decoding | predicted | bf16 product, at best |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for case, rows in _CASES.items():
        for target, peak in _PEAKS.items():
            parts = predicted(case, rows, target)
            dense = (2 * _SIZE * _SIZE + 4 * rows * _SIZE) / peak.bandwidth
            dense = max(dense, 4 * rows * _SIZE * _SIZE / peak.operations)
            numbers = [*parts, max(parts), dense]
            cells = " | ".join(f"{1e6 * number:.1f}" for number in numbers)
            print(f"| {case} | {peak.name} | {cells} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
