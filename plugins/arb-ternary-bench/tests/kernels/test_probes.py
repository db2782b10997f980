"""Probes: a backend's own are used and checked, torch stands in."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from arb_ternary.errors import ComponentError
from arb_ternary_bench.kernels import probes
from arb_ternary_bench.kernels.probes import peak_probe, read_probe
from arb_ternary_bench.kernels.timing import measure


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "_LEAST_BUFFER", 1 << 16)
    monkeypatch.setattr(probes, "_PEAK_EDGE", 64)


def test_without_a_backends_probe_it_is_said_what_stands_in() -> None:
    reading = read_probe(["torch"], 1 << 12, seconds=1e-3)
    peak = peak_probe(["torch"])
    assert reading.variant.nbytes == 1 << 16
    assert reading.how.startswith(("torch.", "numpy."))
    assert "no peak" in peak.how
    assert peak.variant.operations == 2 * 64**3


def test_the_buffer_is_four_times_the_cache() -> None:
    assert read_probe(["torch"], 1 << 15, seconds=1e-3).variant.nbytes == 4 << 15


def test_faster_read_probe_of_a_backend_wins(
    changed: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    known: list[tuple[Tensor, int]] = []

    def probe_read(buffer: Tensor) -> int:
        if not known:
            assert (buffer.dtype, buffer.is_contiguous()) == (torch.uint8, True)
            known.append((buffer, int(buffer.view(torch.int64).sum()) % 2**64))
        return known[0][1]

    name = changed({"probe_read": probe_read})
    assert "probe_read of backend changed" in read_probe([name], 1 << 12, seconds=1e-3).how


def test_a_read_probe_that_does_not_read_everything_is_refused(changed: Callable[..., str]) -> None:
    name = changed({"probe_read": lambda buffer: int(buffer.view(torch.int64)[:-8].sum())})
    with pytest.raises(ComponentError, match="probe_read returns"):
        read_probe([name], 1 << 12, seconds=1e-3)


def test_a_backends_peak_is_taken_as_its_rate(changed: Callable[..., str]) -> None:
    rates = [4e12, 2e12]
    probe = peak_probe(["torch", changed({"probe_int8_peak": lambda seconds: rates[0]})])
    timing = measure([probe.variant], 1e-3)["int8 peak"]
    assert probe.variant.operations / timing.least == pytest.approx(4e12)
    assert "registers only" in probe.how
