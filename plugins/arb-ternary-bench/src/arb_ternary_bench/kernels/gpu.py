"""The bench on a GPU: whether there is one, what it can do, and how calls are timed on it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
from attrs import define, evolve, field, frozen

from arb_ternary.backends.reference_probe import probe
from arb_ternary.errors import EnvironmentProblem, UsageProblem
from arb_ternary_bench.kernels.cache import Cache
from arb_ternary_bench.kernels.cells import Cell, Contender
from arb_ternary_bench.kernels.probes import Probe
from arb_ternary_bench.kernels.timing import Variant

#: Cycles that the GPU idles before a call, about half a millisecond. Meanwhile the call is queued,
#: so that the GPU's work is timed and not the time that Python takes to ask for it.
_HEAD_START: Final = 1_000_000
#: Seconds that the head start, emptying the cache and waiting take per call, about.
SPACING: Final = 1e-3
#: Weights of the largest layer whose calls become one graph: most of the time of such calls is
#: Python's.
_SMALL: Final = 2048 * 2048
#: Second-level caches that a flush writes.
_BEYOND: Final = 2
#: Least bytes of the copied buffer, and how many caches it takes otherwise.
_LEAST_BUFFER: Final = 512 << 20
_BUFFER_CACHES: Final = 8
#: Edge of the matrices: large enough that the units are busy.
_EDGE: Final = 8192


def check_device(device: str) -> None:
    """Refuse a device that is unknown or missing.

    Raises:
        UsageProblem: it is neither ``cpu`` nor ``cuda`` nor ``cuda:N``.
        EnvironmentProblem: there is no such GPU.
    """
    if device == "cpu":
        return
    if re.fullmatch(r"cuda(:\d+)?", device) is None:
        raise UsageProblem(
            f"--device: {device!r} is not a device of this bench", "cpu, cuda or cuda:N"
        )
    reason = _obstacle(device)
    if reason is not None:
        raise EnvironmentProblem(
            f"--device {device}: {reason}",
            "run it on a machine with a GPU and a build of torch for it; `arb doctor` shows what "
            "is here, and `arb backends list --device cuda` what every backend needs",
        )


def _obstacle(device: str) -> str | None:
    """Return why a GPU cannot be used, or None."""
    found = probe(device)
    if not found.usable:
        return found.reason
    if not torch.cuda.is_available():
        return "torch cannot use the GPU that the system shows"
    index = int(device.partition(":")[2] or 0)
    count = torch.cuda.device_count()
    if index < count:
        return None
    return "there is only 1" if count == 1 else f"there are only {count}"


def on_device(device: str) -> AbstractContextManager[object]:
    """Make a GPU torch's current one within a block."""
    return torch.cuda.device(device) if device.startswith("cuda") else nullcontext()


def gpu_facts(device: str) -> dict[str, Any] | None:
    """Return the GPU's name, size and software for the record; None on the CPU."""
    if device == "cpu":
        return None
    facts = torch.cuda.get_device_properties(device)
    return {
        "name": facts.name,
        "capability": f"{facts.major}.{facts.minor}",
        "multiprocessors": facts.multi_processor_count,
        "memory_bytes": facts.total_memory,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
    }


def second_level_cache(device: str) -> Cache:
    """Return the size of the GPU's last cache before its memory."""
    return Cache(int(torch.cuda.get_device_properties(device).L2_cache_size), "the driver")


@define
class EventClock:
    """Times a call on the GPU between two events.

    Attributes:
        event: makes one: ``record()``, ``synchronize()``, ``elapsed_time(other)`` in milliseconds.
        head_start: queues something for the GPU to do, so that it does not wait for the call.
        flush: queues what empties the cache; None leaves it as the last call did.
    """

    event: Callable[[], Any]
    head_start: Callable[[], object]
    flush: Callable[[], object] | None = field(default=None)

    def __call__(self, variant: Variant, i: int) -> float:
        if self.flush is not None:
            self.flush()
        self.head_start()
        start = self.event()
        end = self.event()
        start.record()
        variant.call(i)
        end.record()
        end.synchronize()
        return 1e-3 * float(start.elapsed_time(end))


@frozen
class WaitingClock:
    """Times a call by the CPU's clock, from an idle GPU until the GPU is idle again.

    For calls that wait for the GPU themselves, as a training step does: the time that Python takes
    is part of them.
    """

    wait: Callable[[], object]

    def __call__(self, variant: Variant, i: int) -> float:
        self.wait()
        start = time.perf_counter_ns()
        variant.call(i)
        self.wait()
        return (time.perf_counter_ns() - start) * 1e-9


def gpu_clock(device: str, *, cold: bool, cache_bytes: int) -> EventClock:
    """Return the clock of a cell; ``cold`` overwrites more than the cache before every call."""
    flush = None
    if cold:
        flush = torch.empty(_BEYOND * cache_bytes, dtype=torch.uint8, device=device).zero_
    sleep: Any = torch.cuda._sleep
    event: Any = torch.cuda.Event
    return EventClock(lambda: event(enable_timing=True), lambda: sleep(_HEAD_START), flush)


def small(cell: Cell) -> bool:
    """Return whether the calls of a cell become graphs."""
    return cell.weights <= _SMALL


def as_graph(
    contender: Contender,
    capture: Callable[[Callable[[], object]], Callable[[], object]] | None = None,
) -> Contender:
    """Return the contender with each of its calls as one graph, or with a note where that fails.

    Args:
        contender: already checked.
        capture: makes a graph of a call and returns what runs it; by default torch's.
    """
    variant = contender.variant
    if variant.reports_seconds:
        return contender
    record = _capture if capture is None else capture
    try:
        graphs = [record(lambda i=i: variant.call(i)) for i in range(variant.copies)]  # type: ignore[misc]
    except Exception as error:  # a call may refuse in any way: an optimizer asserts
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return _noted(contender, variant, f"not as a graph: {lines[0]}")
    return _noted(contender, evolve(variant, call=lambda i: graphs[i]()), "as a graph")


def _noted(contender: Contender, variant: Variant, note: str) -> Contender:
    return evolve(
        contender, variant=variant, note=f"{contender.note}; {note}" if contender.note else note
    )


def _capture(call: Callable[[], object]) -> Callable[[], object]:
    stream: Any = torch.cuda.Stream
    side = stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):  # compile, measure and allocate before the capture
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def copy_probe(device: str, cache_bytes: int) -> Probe:
    """Return a copy from memory to memory of more than caches hold."""
    nbytes = max(_LEAST_BUFFER, _BUFFER_CACHES * cache_bytes)
    source = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    variant = Variant(name="copy bandwidth", call=lambda _: target.copy_(source), nbytes=2 * nbytes)
    return Probe(variant, f"a copy of {nbytes >> 20} MiB, what is read and what is written")


def matrix_probe(device: str, dtype: torch.dtype) -> Probe:
    """Return torch's product of large square matrices, int8 to int32 or bfloat16.

    It is a library's rate, and no peak of the units.
    """
    edge = _EDGE
    name = "int8 peak" if dtype is torch.int8 else "bfloat16 peak"
    if dtype is torch.int8:
        left, right = (
            torch.randint(-127, 128, (edge, edge), dtype=dtype, device=device) for _ in range(2)
        )
        variant = Variant(
            name=name, call=lambda _: torch._int_mm(left, right.t()), operations=2 * edge**3
        )
        return Probe(variant, f"torch._int_mm of {edge} x {edge} matrices")
    left, right = (torch.randn(edge, edge, device=device).to(dtype) for _ in range(2))
    variant = Variant(name=name, call=lambda _: left @ right.t(), operations=2 * edge**3)
    return Probe(variant, f"torch.matmul of {edge} x {edge} matrices in bfloat16")
