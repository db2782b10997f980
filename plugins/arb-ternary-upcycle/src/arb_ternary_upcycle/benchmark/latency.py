"""How long a model takes to read a prompt and to go on."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from attrs import frozen

from arb_ternary_text.models.decoder import Decoder

Clock = Callable[[], float]


@frozen
class Timing:
    """One pass, seconds.

    Attributes:
        prefill: reading the prompt, logits of all its positions included.
        first_token: from the ids of the prompt to the id of the first token: prefill, an empty
            cache, the choice.
        decode: each further token.
    """

    prefill: float
    first_token: float
    decode: float


def time_pass(
    model: Decoder,
    prompt: int,
    generation: int,
    batch: int,
    device: torch.device,
    clock: Clock = time.perf_counter,
) -> Timing:
    """One pass: ``batch`` prompts of ``prompt`` tokens, of which each gets ``generation`` tokens,
    two at least.
    """
    tokens_BS = (
        torch.arange(batch * prompt, device=device).view(batch, prompt) % model.vocabulary_size
    )
    with torch.no_grad():  # inference_mode would mark what kernels keep, and training go on with it
        _finish(device)
        start = clock()
        cache = model.new_cache(batch)
        before = clock()
        logits = model(tokens_BS, cache)
        _finish(device)
        read = clock()
        token_B1 = logits[:, -1:].argmax(dim=-1)
        _finish(device)
        first = clock()
        for _ in range(generation - 1):
            token_B1 = model(token_B1, cache)[:, -1:].argmax(dim=-1)
        _finish(device)
        end = clock()
    return Timing(read - before, first - start, (end - first) / (generation - 1))


def generate_greedily(
    model: Decoder, prompt: int, generation: int, batch: int, device: torch.device
) -> None:
    """What :func:`time_pass` times."""
    time_pass(model, prompt, generation, batch, device)


def measure_latency(
    models: Mapping[str, Decoder],
    size: tuple[int, int, int],
    *,
    warmup: int,
    timed: int,
    device: torch.device,
    clock: Clock = time.perf_counter,
    between: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:
    """A row for each of ``models``, by name: the passes of all alternate, so that a slow moment
    meets each.

    Args:
        models: in evaluation mode.
        size: prompt, generation, batch.
        warmup: passes of each before the timed ones.
        timed: passes of each that count.
        device: where they are.
        clock: seconds.
        between: called between passes; what it raises ends the measurement.
    """
    timings: dict[str, list[Timing]] = {name: [] for name in models}
    for number in range(warmup + timed):
        for name, model in models.items():
            between()
            found = time_pass(model, *size, device, clock)
            if number >= warmup:
                timings[name].append(found)
    return [_row(name, size, found) for name, found in timings.items()]


def _row(name: str, size: tuple[int, int, int], timings: list[Timing]) -> dict[str, Any]:
    prompt, generation, batch = size
    row: dict[str, Any] = {
        "model": name,
        "prompt": prompt,
        "generation": generation,
        "batch": batch,
    }
    for part in ("prefill", "first_token", "decode"):
        seconds = [getattr(timing, part) for timing in timings]
        row[f"{part}_seconds"] = statistics.median(seconds)
        row[f"{part}_seconds_least"] = min(seconds)
        row[f"{part}_seconds_most"] = max(seconds)
    row["prefill_tokens_per_second"] = batch * prompt / row["prefill_seconds"]
    row["decode_tokens_per_second"] = batch / row["decode_seconds"]
    row["timed_runs"] = len(timings)
    return row


def _finish(device: torch.device) -> None:
    """Wait for what the device has been given to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
