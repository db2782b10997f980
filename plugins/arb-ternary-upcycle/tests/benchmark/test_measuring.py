"""Latency from given repetitions, and bytes in closed form."""

from __future__ import annotations

import copy
from itertools import count
from typing import Any

import pytest
import torch
from attrs import evolve

from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_text.models.decoder import Decoder
from arb_ternary_upcycle.benchmark import latency, memory
from arb_ternary_upcycle.benchmark.config import BenchmarkConfig
from arb_ternary_upcycle.benchmark.latency import GenerationTimes, measure_latency
from arb_ternary_upcycle.benchmark.memory import measure_memory, memory_growth, weight_bytes

CPU = torch.device("cpu")


@pytest.fixture
def model(small: DecoderConfig) -> Decoder:
    return Decoder(small, 256).eval()


def test_latency_is_the_median_of_alternating_repetitions(
    model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[Any] = []
    numbers = count(1)

    def timed(model: Decoder, size: tuple[int, int, int], seed: int) -> GenerationTimes:
        order.append(model)
        assert size == (6, 4, 2)
        number = float(next(numbers))
        return GenerationTimes(number, [90 * number, 100 * number, 110 * number])

    monkeypatch.setattr(latency, "generate_random", timed)
    paused: list[int] = []
    other = copy.deepcopy(model)
    rows = measure_latency(
        {"teacher": model, "student": other},
        (6, 4, 2),
        warmup=1,
        timed=3,
        between=lambda: paused.append(1),
    )
    assert order == [model, other] * 4
    assert len(paused) == 8
    # Teacher: repetitions 1 | 3, 5, 7; student: 2 | 4, 6, 8.
    first, second = rows
    assert (first["model"], second["model"]) == ("teacher", "student")
    assert (first["first_token_seconds"], second["first_token_seconds"]) == (5.0, 6.0)
    assert first["decode_seconds"] == 500.0
    assert (first["decode_seconds_least"], first["decode_seconds_most"]) == (300.0, 700.0)
    assert first["prefill_tokens_per_second"] == 2 * 6 / 5.0
    assert first["decode_tokens_per_second"] == 2 / 500.0
    assert (first["prompt"], first["generation"], first["batch"]) == (6, 4, 2)
    assert first["timed_runs"] == 3


def test_latency_of_a_real_model(model: Decoder) -> None:
    (row,) = measure_latency({"student": model}, (5, 3, 2), warmup=0, timed=1)
    assert row["first_token_seconds"] > 0
    assert row["decode_seconds"] > 0


def test_weight_bytes_exclude_votes(small: DecoderConfig, model: Decoder) -> None:
    linears = 2 * (32 * 32 + 2 * 16 * 32 + 32 * 32 + 3 * 32 * 48)
    gains = 5 * 32
    assert weight_bytes(model) == (
        linears + gains + 2 * 256 * 32,
        4 * (linears + gains + 2 * 256 * 32),
    )
    ternary = Decoder(
        evolve(small, float_parts=(), group_size=32, inner_gains=False, feed_forward=64), 256
    )
    numbers, size = weight_bytes(ternary)
    weights = 2 * (32 * 32 + 2 * 16 * 32 + 32 * 32 + 3 * 32 * 64) + 2 * 256 * 32
    assert numbers == weights
    # Two bits per trit, and an exponent and its origin for each 32 of them, at most; votes, a byte
    # each, are not there.
    assert weights / 4 <= size < weights / 4 + weights / 8


def test_memory_row_adds_up(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = weight_bytes(model)[1]
    cache = 3 * (5 + 4 - 1) * 2 * (2 * 8 + 2 * 8) * 4
    for growth, peak in ((10**6, weights + 10**6), (0, weights + cache), (None, None)):
        monkeypatch.setattr(memory, "memory_growth", lambda work, device, growth=growth: growth)
        row = measure_memory("student", model, (5, 4, 3), CPU)
        assert (row["weight_bytes"], row["kv_cache_bytes"], row["peak_bytes"]) == (
            weights,
            cache,
            peak,
        )
    assert row["bits_per_weight"] == 32.0


def test_memory_growth_of_a_process() -> None:
    held: list[torch.Tensor] = []

    def work() -> None:
        held.append(torch.ones(1 << 24))
        held.clear()

    growth = memory_growth(work, CPU)
    if growth is None:
        pytest.skip("this system does not tell the peak of a process")
    assert 0.9 * 2**26 <= growth < 2 * 2**26
    assert memory_growth(lambda: None, CPU) in range(2**22)


def test_unknown_peak_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(memory, "_RESET_PEAK", tmp_path)
    assert memory_growth(lambda: None, CPU) is None
    assert memory_growth(lambda: None, torch.device("mps")) is None


BAD: list[tuple[dict[str, Any], str]] = [
    ({"measure": ()}, "each once"),
    ({"measure": ("memory", "memory")}, "each once"),
    ({"prompt_lengths": ()}, "at least 1"),
    ({"prompt_lengths": (0,)}, "at least 1"),
    ({"batch_sizes": (2, 2)}, "different whole numbers"),
    ({"generation_lengths": (1,)}, "at least 2"),
]


@pytest.mark.parametrize(("options", "message"), BAD)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BenchmarkConfig(**options)


def test_every_combination_of_sizes_is_measured() -> None:
    config = BenchmarkConfig(prompt_lengths=(4, 8), generation_lengths=(2, 3), batch_sizes=(1,))
    assert config.sizes == [(4, 2, 1), (4, 3, 1), (8, 2, 1), (8, 3, 1)]
