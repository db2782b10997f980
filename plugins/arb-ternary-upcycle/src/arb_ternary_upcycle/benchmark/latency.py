"""Times to read a prompt and to generate tokens, measured by the code of ``arb bench generate``."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

from arb_ternary.errors import EnvironmentProblem
from arb_ternary.plugins.discovery import install_command
from arb_ternary_text.models.decoder import Decoder


def require_bench() -> None:
    """Check that the distribution that measures is installed.

    Raises:
        EnvironmentProblem: it is not.
    """
    if find_spec("arb_ternary_bench") is None:
        raise EnvironmentProblem(
            "benchmark: latency and memory are measured by arb-ternary-bench, which is not "
            "installed",
            f"{install_command('arb-ternary-bench')}\n"
            "or measure without them: measure: [perplexity]",
        )


def measure_latency(
    models: Mapping[str, Decoder],
    size: tuple[int, int, int],
    *,
    warmup: int,
    timed: int,
    between: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:
    """Time all models on random prompts, in turns, so that a slow moment affects all of them.

    ``arb bench generate`` measures random weights in processes of their own; here they are those of
    the run, in its process.

    Args:
        models: by name, in evaluation mode.
        size: prompt, generation, batch.
        warmup: repetitions of each before the timed ones.
        timed: repetitions of each that count.
        between: called between repetitions; an exception ends the measurement.

    Returns:
        a row for each model.
    """
    from arb_ternary_bench.generation.cases import Case, Repetition, measure_once
    from arb_ternary_bench.generation.decoders import DecoderSession

    prompt, generation, batch = size
    case = Case(prompt=prompt, batch=batch, new_tokens=generation)
    sessions = {name: DecoderSession(model) for name, model in models.items()}
    repetitions: dict[str, list[Repetition]] = {name: [] for name in models}
    for number in range(warmup + timed):
        for name, session in sessions.items():
            between()
            once = measure_once(session, case, models[name].vocabulary_size, seed=number)
            if number >= warmup:
                repetitions[name].append(once)

    rows = []
    for name, found in repetitions.items():
        first = statistics.median(each.prompt_seconds for each in found)
        # One number per repetition: passes of one repetition differ by their position.
        decode = [statistics.mean(each.token_seconds) for each in found]
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
