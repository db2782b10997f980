"""One way of training in a process of its own, so that its peak memory is its own, on the processor
or on a GPU.

``python -m arb_ternary_bench.steps.child '{"name": ..., "shape": {...}, "threads": 1}'`` takes a
few steps and prints one line of JSON.
"""

from __future__ import annotations

import json
import sys
from typing import Any, Final

from attrs import asdict

from arb_ternary_bench.answers import ask_process
from arb_ternary_bench.steps.trainees import StepShape

_MODULE: Final = "arb_ternary_bench.steps.child"
#: Enough for every buffer that a step allocates to exist, and for allocators to have settled.
_STEPS: Final = 3


def measure_memory(name: str, shape: StepShape, threads: int) -> dict[str, int]:
    """``peak_bytes`` of a process that trains alone, and ``base_bytes``: what it held after a step
    of a tiny model.

    On a GPU it is what the tensors of the process took there.

    Raises:
        ArbError: the process failed.
    """
    request = {"name": name, "shape": asdict(shape), "threads": threads}
    return ask_process(
        _MODULE, request, threads=threads, title=name, measures="measures its memory"
    )


def main(request: str) -> dict[str, Any]:
    """Train and say what it took."""
    import torch
    from attrs import evolve

    from arb_ternary_bench.kernels.gpu import on_device
    from arb_ternary_bench.steps.resident import device_bytes, device_peak_bytes
    from arb_ternary_bench.steps.trainees import build_trainee

    asked = json.loads(request)
    torch.set_num_threads(asked["threads"])
    shape = StepShape(**asked["shape"])
    # What libraries load and allocate on their first use is no part of the model.
    with on_device(shape.device):
        build_trainee(asked["name"], evolve(shape, out_features=64, in_features=64, rows=8)).step()
        base = device_bytes(shape.device)
        trainee = build_trainee(asked["name"], shape)
        for _ in range(_STEPS):
            trainee.step()
        return {"base_bytes": base, "peak_bytes": device_peak_bytes(shape.device)}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
