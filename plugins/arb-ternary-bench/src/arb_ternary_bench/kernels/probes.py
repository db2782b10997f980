"""The limits of the machine, measured in the same run: the rate of reading memory, the int8 peak.

A backend may have probes of its own, as optional attributes next to ``kernels``. They do nothing
else, so that what they reach is the machine's limit and not a library's:

``probe_read(buffer) -> int``
    Read every byte of a contiguous uint8 tensor, whose size is a multiple of 8, once, with as many
    threads as ``torch.get_num_threads()`` says, and return the sum of its 64-bit words modulo
    2**64, as a number of either sign. The sum is checked.

``probe_int8_peak(seconds) -> float``
    Multiply and add int8 in registers alone, with as many threads, for about ``seconds``, and
    return operations per second over all threads; a multiplication and an addition are two.

Without them the read rate is the best of several reductions of torch and numpy, and the int8 peak
is that of torch's int8 matrix product on matrices that stay in the cache. A kernel can exceed such
a peak.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from arb_ternary.backends.select import get_backend
from arb_ternary.errors import ComponentError
from arb_ternary_bench.kernels.timing import Variant, measure

#: The read probe's buffer in sizes of the last-level cache.
_BUFFER_CACHES: Final = 4
_LEAST_BUFFER: Final = 64 << 20
#: Edge of the matrices that stand in for a peak: 3 MiB of int8 and int32, which caches hold.
_PEAK_EDGE: Final = 768
#: Seconds of one sample of a backend's peak probe.
_PEAK_SECONDS: Final = 2e-3


@frozen
class Probe:
    """A variant that takes turns with kernels, and how it measures.

    Rates follow from its ``nbytes`` or ``operations``.
    """

    variant: Variant
    how: str


@frozen
class Limits:
    """The limits of the machine. The peak in bfloat16 is measured on GPUs only."""

    reading: Probe
    int8: Probe
    bfloat16: Probe | None = None

    def variants(self) -> list[Variant]:
        """Return what is timed."""
        probes = (self.reading, self.int8, self.bfloat16)
        return [probe.variant for probe in probes if probe is not None]

    def how(self) -> dict[str, str | None]:
        """Describe how each is measured."""
        return {
            "read_bandwidth": self.reading.how,
            "int8_peak": self.int8.how,
            "bfloat16_peak": None if self.bfloat16 is None else self.bfloat16.how,
        }


def read_probe(backends: Sequence[str], cache_bytes: int, seconds: float = 0.05) -> Probe:
    """Return the fastest way to read a buffer that no cache holds.

    Args:
        backends: asked for a probe of their own.
        cache_bytes: of the last-level cache.
        seconds: how long each way is tried.

    Raises:
        ComponentError: a backend's probe returns a wrong sum.
    """
    words = max(_LEAST_BUFFER, _BUFFER_CACHES * cache_bytes) // 8
    buffer = torch.randint(-(2**62), 2**62, (words,), dtype=torch.int64)
    ways: dict[str, Callable[[int], Any]] = {}
    raw = buffer.view(torch.uint8)
    for name, probe in _probes(backends, "probe_read"):
        _check_sum(name, int(probe(raw)), int(buffer.sum()))
        ways[f"probe_read of backend {name}"] = partial(_read, probe, raw)
    singles = buffer.view(torch.int32)
    array = buffer.numpy()
    ways |= {
        "torch.sum of int64": lambda _: torch.sum(buffer),
        "torch.amax of int64": lambda _: torch.amax(buffer),
        "torch.amax of int32": lambda _: torch.amax(singles),
        "numpy.bitwise_xor.reduce of int64": lambda _: np.bitwise_xor.reduce(array),
    }
    timings = measure([Variant(name=name, call=call) for name, call in ways.items()], seconds)
    best = min(timings, key=lambda name: timings[name].least)
    variant = Variant(
        name="read bandwidth", call=ways[best], nbytes=raw.numel(), rotated_bytes=raw.numel()
    )
    return Probe(variant, f"{best}, {raw.numel() >> 20} MiB")


def _read(probe: Callable[[Tensor], int], buffer: Tensor, _copy: int) -> int:
    return probe(buffer)


def _seconds_per_operation(probe: Callable[[float], float], _copy: int) -> float:
    return 1.0 / probe(_PEAK_SECONDS)


def _check_sum(name: str, got: int, wanted: int) -> None:
    if (got - wanted) % 2**64:
        raise ComponentError(
            f"backend {name!r}: probe_read returns {got} for a buffer whose words sum to {wanted}",
            "a probe that does not read everything would make the machine look faster than it is",
        )


def peak_probe(backends: Sequence[str]) -> Probe:
    """Return the int8 peak by the first backend that has a probe, or by torch's matrix product."""
    for name, probe in _probes(backends, "probe_int8_peak"):
        # A probe reports a rate. As the time of one operation it is summarised like all others.
        return Probe(
            Variant(
                name="int8 peak",
                call=partial(_seconds_per_operation, probe),
                reports_seconds=True,
                operations=1,
            ),
            f"probe_int8_peak of backend {name}, registers only",
        )
    edge = _PEAK_EDGE
    left = torch.randint(-127, 128, (edge, edge), dtype=torch.int8)
    right = torch.randint(-127, 128, (edge, edge), dtype=torch.int8).t()
    variant = Variant(
        name="int8 peak", call=lambda _: torch._int_mm(left, right), operations=2 * edge**3
    )
    return Probe(
        variant,
        f"torch._int_mm of {edge} x {edge} matrices in the cache: no peak of the units themselves",
    )


def _probes(backends: Sequence[str], name: str) -> list[tuple[str, Any]]:
    """Return the probe of each backend that has it."""
    found = [(backend, getattr(get_backend(backend), name, None)) for backend in backends]
    return [(backend, probe) for backend, probe in found if probe is not None]
