"""Times to read a prompt and to generate tokens."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from attrs import frozen

from arb_ternary_text.models.decoder import Decoder


@frozen
class GenerationTimes:
    """Seconds of one generation.

    Attributes:
        prompt: from the ids of the prompts to the ids of the first tokens.
        tokens: of every pass that generated a further token of each sequence.
    """

    prompt: float
    tokens: list[float]


@torch.no_grad()
def generate_random(model: Decoder, size: tuple[int, int, int], seed: int = 0) -> GenerationTimes:
    """Read random prompts and generate the likeliest tokens.

    Args:
        model: in evaluation mode.
        size: prompt, generation, batch.
        seed: of the prompts.
    """
    prompt, generation, batch = size
    device = model.embedding.weight.device
    generator = torch.Generator().manual_seed(seed)
    ids_BS = torch.randint(model.vocabulary_size, (batch, prompt), generator=generator).to(device)
    cache = model.new_cache(batch)
    seconds = []
    for _ in range(generation):
        before = time.perf_counter()
        likeliest_B = model.next_logits(ids_BS, cache).argmax(dim=-1)
        likeliest_B.cpu()  # waits for the device
        seconds.append(time.perf_counter() - before)
        ids_BS = likeliest_B[:, None]
    return GenerationTimes(seconds[0], seconds[1:])


def measure_latency(
    models: Mapping[str, Decoder],
    size: tuple[int, int, int],
    *,
    warmup: int,
    timed: int,
    between: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:
    """Time all models on random prompts, in turns, so that a slow moment affects all of them.

    Args:
        models: by name, in evaluation mode.
        size: prompt, generation, batch.
        warmup: repetitions of each before the timed ones.
        timed: repetitions of each that count.
        between: called between repetitions; an exception ends the measurement.

    Returns:
        a row for each model.
    """
    prompt, generation, batch = size
    repetitions: dict[str, list[GenerationTimes]] = {name: [] for name in models}
    for number in range(warmup + timed):
        for name, model in models.items():
            between()
            times = generate_random(model, size, seed=number)
            if number >= warmup:
                repetitions[name].append(times)

    rows = []
    for name, found in repetitions.items():
        first = statistics.median(times.prompt for times in found)
        # One number per repetition: passes of one repetition differ by their position.
        decode = [statistics.mean(times.tokens) for times in found]
        rows.append(
            {
                "model": name,
                "prompt": prompt,
                "generation": generation,
                "batch": batch,
                "first_token_seconds": first,
                "decode_seconds": statistics.median(decode),
                "decode_seconds_least": min(decode),
                "decode_seconds_most": max(decode),
                "prefill_tokens_per_second": batch * prompt / first,
                "decode_tokens_per_second": batch / statistics.median(decode),
                "timed_runs": len(found),
            }
        )
    return rows
