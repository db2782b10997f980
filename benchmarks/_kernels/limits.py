"""The limits of the machine, measured among the contenders: reading memory, and the int8 peak.

A backend may have probes of its own, as attributes next to ``kernels``. They do nothing else, so
that what they reach is the machine's limit and not a library's:

``probe_read(buffer) -> int``
    Read every byte of a contiguous uint8 tensor, whose size is a multiple of 8, once, with as many
    threads as ``torch.get_num_threads()`` says, and return the sum of its 64-bit words modulo
    2**64, as a number of either sign. The sum is checked.

``probe_int8_peak(seconds) -> float``
    Multiply and add int8 in registers alone, with as many threads, for about ``seconds``, and
    return operations per second over all threads; a multiplication and an addition are two.

Without them the limits are those of torch's reductions and products, which a kernel can exceed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from attrs import frozen

from arb_ternary.backends.select import get_backend
from arb_ternary.errors import ComponentError
from harness.timing import Timing, Variant

READ: Final = "read bandwidth"
INT8: Final = "int8 peak"
#: The buffer of the read probe in sizes of the last-level cache, and its least size.
_BUFFER_CACHES: Final = 4
_LEAST_BUFFER: Final = 64 << 20
#: Least bytes of the buffer that a GPU copies.
_GPU_BUFFER: Final = 512 << 20
#: Edges of the matrices of a library's peak: that a cache holds, and that keep a GPU busy.
_EDGE: Final = 768
_GPU_EDGE: Final = 8192
#: Seconds of one sample of a backend's peak probe.
_PEAK_SECONDS: Final = 2e-3
#: Size of the last-level cache if the system does not say.
_GUESS: Final = 64 << 20


@frozen
class Limit:
    """A variant that takes turns with kernels, and how it measures.

    Rates follow from its ``nbytes`` or ``operations``.
    """

    variant: Variant
    how: str

    def rate(self, timings: Mapping[str, Timing]) -> float:
        """Return bytes or operations per second."""
        return (self.variant.nbytes or self.variant.operations) / timings[self.variant.name].least


def limits_of(device: str, backends: Sequence[str], cache_bytes: int) -> list[Limit]:
    """Return the limits of a device: reading memory, and int8."""
    if device == "cpu":
        return [read_limit(backends, cache_bytes), int8_limit(backends)]
    nbytes = max(_GPU_BUFFER, 2 * _BUFFER_CACHES * cache_bytes)
    source = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = Variant(name=READ, call=lambda _: target.copy_(source), nbytes=2 * nbytes)
    return [
        Limit(copy, f"a copy of {nbytes >> 20} MiB, what is read and what is written"),
        _int_mm_limit(_GPU_EDGE, device),
    ]


def read_limit(backends: Sequence[str], cache_bytes: int) -> Limit:
    """Return how a buffer is read that no cache holds.

    Raises:
        ComponentError: a backend's probe returns a wrong sum.
    """
    words = max(_LEAST_BUFFER, _BUFFER_CACHES * cache_bytes) // 8
    buffer = torch.randint(-(2**62), 2**62, (words,), dtype=torch.int64)
    raw = buffer.view(torch.uint8)
    size = f"{raw.numel() >> 20} MiB"
    for name, probe in _probes(backends, "probe_read"):
        got = int(probe(raw))
        wanted = int(buffer.sum())
        if (got - wanted) % 2**64:
            raise ComponentError(
                f"backend {name!r}: probe_read returns {got} for a buffer whose words sum to "
                f"{wanted}",
                "a probe that does not read everything would make the machine look faster than it "
                "is",
            )
        read = Variant(name=READ, call=lambda _, probe=probe: probe(raw), nbytes=raw.numel())  # type: ignore[misc]
        return Limit(read, f"probe_read of backend {name}, {size}")
    amax = Variant(name=READ, call=lambda _: torch.amax(buffer), nbytes=raw.numel())
    return Limit(amax, f"torch.amax of int64, {size}")


def int8_limit(backends: Sequence[str]) -> Limit:
    """Return the int8 peak by the first backend that has a probe, or by torch's matrix product."""
    for name, probe in _probes(backends, "probe_int8_peak"):
        # A probe reports a rate. As the time of one operation it is summarised like all others.
        variant = Variant(
            name=INT8,
            call=lambda _, probe=probe: 1.0 / probe(_PEAK_SECONDS),  # type: ignore[misc]
            reports_seconds=True,
            operations=1,
        )
        return Limit(variant, f"probe_int8_peak of backend {name}, registers only")
    return _int_mm_limit(_EDGE, "cpu")


def _int_mm_limit(edge: int, device: str) -> Limit:
    left = torch.randint(-127, 128, (edge, edge), dtype=torch.int8, device=device)
    variant = Variant(
        name=INT8, call=lambda _: torch._int_mm(left, left.t()), operations=2 * edge**3
    )
    return Limit(variant, f"torch._int_mm of {edge} x {edge} matrices: a library's rate, no peak")


def _probes(backends: Sequence[str], name: str) -> list[tuple[str, Any]]:
    """Return the probe of each backend that has it."""
    found = [(backend, getattr(get_backend(backend), name, None)) for backend in backends]
    return [(backend, probe) for backend, probe in found if probe is not None]


def cache_size(device: str) -> int:
    """Return the bytes of all last-level caches: threads may run under each of them."""
    if device != "cpu":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    found: dict[str, int] = {}
    for index in Path("/sys/devices/system/cpu").glob("cpu[0-9]*/cache/index3"):
        size = (index / "size").read_text().strip().removesuffix("K")
        found[(index / "shared_cpu_list").read_text()] = int(size) << 10
    return sum(found.values()) or _GUESS
