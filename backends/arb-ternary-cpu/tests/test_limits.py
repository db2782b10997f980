"""Probes of the machine's limits: everything is read, rates are rates, arguments are checked."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from arb_ternary_cpu.backend import CpuBackend, build
from arb_ternary_cpu.isa import usable_isas

# For each instruction set.
pytestmark = pytest.mark.sampled("backend")


@pytest.fixture(params=usable_isas())
def backend(request: pytest.FixtureRequest) -> CpuBackend:
    made = build(request.param)
    assert isinstance(made, CpuBackend)
    return made


def words(count: int, offset: int = 0) -> torch.Tensor:
    """Bytes of as many random 64-bit words, which need not begin at a word's address."""
    room = torch.randint(0, 256, (8 * count + offset,), dtype=torch.uint8)
    return room[offset:]


def total(buffer: torch.Tensor) -> int:
    """The sum of 64-bit words in Python's integers."""
    data = buffer.numpy().tobytes()
    return sum(int.from_bytes(data[at : at + 8], "little") for at in range(0, len(data), 8)) % 2**64


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("count", [0, 1, 7, 31, 32, 33, 1000, 32768, 70001])
def test_the_sum_is_that_of_every_word_modulo_two_to_the_64(
    backend: CpuBackend, count: int, threads: int
) -> None:
    torch.set_num_threads(threads)
    for offset in (0, 3):
        buffer = words(count, offset)
        assert backend.probe_read(buffer) % 2**64 == total(buffer)
    torch.set_num_threads(1)


def test_a_word_that_changes_anywhere_changes_the_sum(backend: CpuBackend) -> None:
    buffer = words(513)
    before = backend.probe_read(buffer)
    for place in (0, 8 * 255, 8 * 256, 8 * 512 + 7):
        changed = buffer.clone()
        changed[place] ^= 1
        assert backend.probe_read(changed) != before


@pytest.mark.parametrize(
    ("buffer", "kind", "message"),
    [
        (torch.zeros(12, dtype=torch.uint8), ValueError, "multiple of 8 bytes, got 12"),
        (torch.zeros(32, dtype=torch.uint8)[::2], ValueError, "contiguous"),
        (torch.zeros(16, dtype=torch.int8), TypeError, "buffer must be torch.uint8"),
        (torch.zeros(16, dtype=torch.uint8, device="meta"), TypeError, "on the CPU"),
    ],
)
def test_a_buffer_that_cannot_be_read_is_refused(
    buffer: torch.Tensor, kind: type[Exception], message: str
) -> None:
    probing: Any = build()
    with pytest.raises(kind, match=message):
        probing.probe_read(buffer)


@pytest.mark.parametrize("threads", [1, 2])
def test_peak_does_not_depend_on_how_long_it_is_measured(backend: CpuBackend, threads: int) -> None:
    torch.set_num_threads(threads)
    # The best of three: a process that loses its core in the middle of a millisecond has no rate.
    rates = [
        max(backend.probe_int8_peak(seconds) for _ in range(3)) for seconds in (1e-4, 1e-3, 4e-3)
    ]
    torch.set_num_threads(1)
    # No processor is as slow or as fast as this; a time, a count of operations or a rate per call
    # would be.
    assert all(1e7 < rate < 1e15 for rate in rates), rates


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.inf, math.nan])
def test_a_time_that_is_none_is_refused(seconds: float) -> None:
    probing: Any = build()
    with pytest.raises(ValueError, match="seconds must be positive and finite"):
        probing.probe_int8_peak(seconds)
