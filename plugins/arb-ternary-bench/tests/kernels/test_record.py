"""Ratios, rates and shares of a cell are those of its times."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from arb_ternary_bench.kernels.cells import Cell, Contender
from arb_ternary_bench.kernels.probes import Limits, Probe
from arb_ternary_bench.kernels.record import cell_record
from arb_ternary_bench.kernels.result import TABLE
from arb_ternary_bench.kernels.timing import Timing, Variant


def contender(name: str, role: Any, **changes: Any) -> Contender:
    variant = Variant(name=name, call=lambda _: None, nbytes=1000, operations=4000, **changes)
    return Contender(variant=variant, role=role, name=name, check=lambda: None, checked="exact")


@pytest.fixture
def record(make_cell: Callable[..., Cell]) -> dict[str, Any]:
    contenders = [
        contender("cpu", "backend", copies=4, rotated_bytes=800),
        contender("torch bfloat16", "torch bfloat16"),
        contender("slow int8", "torch int8"),
        contender("fast int8", "torch int8"),
        contender("a peer", "peer"),
        contender("a better peer", "peer"),
    ]
    timings = {
        "cpu": Timing(1e-6, 2e-6, 9),
        "torch bfloat16": Timing(8e-6, 12e-6, 9),
        "slow int8": Timing(5e-6, 5e-6, 9),
        "fast int8": Timing(2e-6, 9e-6, 9),
        "a peer": Timing(4e-6, 4e-6, 9),
        "a better peer": Timing(3e-6, 4e-6, 9),
        "read": Timing(1e-3, 2e-3, 9),
        "peak": Timing(1e-9, 2e-9, 9),
    }
    reading = Variant(name="read", call=lambda _: None, nbytes=2_000_000)
    peak = Variant(name="peak", call=lambda _: None, operations=8)
    excluded = [{"name": "ggml TQ1_0", "reason": "K must be a multiple of 256"}]
    limits = Limits(Probe(reading, "r"), Probe(peak, "p"))
    return cell_record(make_cell(cold=True), contenders, excluded, timings, limits)


def test_speedup_is_fastest_baseline_over_row(
    record: dict[str, Any],
) -> None:
    row = record["rows"][0]
    assert row["speedup"] == pytest.approx(
        {"torch_bfloat16": 8.0, "torch_int8": 2.0, "torch_adamw": None, "best_peer": 3.0}
    )
    assert row["speedup_median"]["torch_bfloat16"] == pytest.approx(6.0)
    assert record["baselines"] == {
        "torch_bfloat16": "torch bfloat16",
        "torch_int8": "fast int8",
        "torch_adamw": None,
        "best_peer": "a better peer",
    }
    assert record["rows"][1]["speedup"]["torch_bfloat16"] == 1.0


def test_shares_are_of_the_limits_measured_in_the_same_cell(record: dict[str, Any]) -> None:
    row = record["rows"][0]
    assert record["read_bandwidth"] == pytest.approx(2e9)
    assert record["int8_peak"] == pytest.approx(8e9)
    assert row["bytes_per_second"] == pytest.approx(1e9)
    assert row["of_read_bandwidth"] == pytest.approx(0.5)
    assert row["of_int8_peak"] == pytest.approx(0.5)
    assert (row["copies"], row["rotated_bytes"]) == (4, 3200)


def result_of(record: dict[str, Any]) -> dict[str, Any]:
    machine = {
        "processor": "a processor",
        "cores": 2,
        "threads": 1,
        "torch": "2",
        "torch_cpu_capability": "AVX2",
        "commit": None,
        "load_average": 0.1,
        "load_average_at_end": 0.2,
        "gpu": None,
    }
    absent = {
        "name": "x",
        "summary": "",
        "available": False,
        "reason": "not here",
        "install": "pip install x",
    }
    return {
        "machine": machine,
        "cache_bytes": 32 << 20,
        "probes": {"read_bandwidth": "r", "int8_peak": "p", "bfloat16_peak": None},
        "peers": [absent],
        "cells": [record, {**record, "cache": "hot"}],
    }


def test_the_table_has_every_contender_and_the_limits(record: dict[str, Any]) -> None:
    found = TABLE.rows(result_of(record))
    assert {len(row) for row in found} == {len(TABLE.columns)}
    assert found[0][:6] == ("linear", "48 x 160", "32", "3", "cold", "cpu")
    assert found[0][6:] == ("1.0", "2.0", "1.0", "50%", "4", "50%", "", "8.00", "2.00", "", "3.00")
    assert found[6][5] == "limit: read, int8"
    assert found[7][9] == ""  # from the cache: no share of the rate of memory


def test_the_notes_name_what_is_missing(record: dict[str, Any]) -> None:
    text = TABLE.markdown(result_of(record))
    assert "Peer x is not installed: not here. Install: pip install x" in text
    assert "ggml TQ1_0 left out of linear 48 x 160: K must be a multiple of 256." in text
    assert "cold: calls rotate among copies of twice the last-level cache, 32 MiB" in text
