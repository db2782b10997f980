"""One way of training in a process of its own, so that its peak memory is its own."""

from __future__ import annotations

from typing import Any, Final

from attrs import asdict, evolve

from arb_ternary_bench.child import answer, ask
from arb_ternary_bench.steps.trainees import StepShape, build_trainee

_MODULE: Final = "arb_ternary_bench.steps.child"
#: Enough for every buffer of a step to exist, and for allocators to have settled.
_STEPS: Final = 3


def measure_memory(name: str, shape: StepShape, threads: int) -> dict[str, int]:
    """Measure the memory of a process that trains alone.

    Returns:
        ``peak_bytes``, and ``base_bytes``: what it held after a step of a tiny model. On a GPU both
        are those of the process's tensors there.

    Raises:
        ArbError: the process failed.
    """
    request = {"name": name, "shape": asdict(shape), "threads": threads}
    return ask(_MODULE, request, title=name, threads=threads)


def respond(request: dict[str, Any]) -> dict[str, int]:
    """Train in the process and return what it took."""
    import torch

    from arb_ternary_bench.kernels.gpu import on_device
    from arb_ternary_bench.memory import device_bytes, device_peak_bytes

    torch.set_num_threads(request["threads"])
    name = request["name"]
    shape = StepShape(**request["shape"])
    with on_device(shape.device):
        # What libraries load and allocate on their first use is not part of the model.
        build_trainee(name, evolve(shape, out_features=64, in_features=64, rows=8)).step()
        base = device_bytes(shape.device)
        trainee = build_trainee(name, shape)
        for _ in range(_STEPS):
            trainee.step()
        return {"base_bytes": base, "peak_bytes": device_peak_bytes(shape.device)}


if __name__ == "__main__":
    answer(lambda request, _orders: [respond(request)])
