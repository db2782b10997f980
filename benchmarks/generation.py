"""Time whole models that read prompts and write tokens, with llama.cpp and torch in bfloat16.

Weights are random, keys and values bfloat16 (float16 in llama.cpp). Every contender has a process
of its own, one at a time, in turns with the others and with a measurement of the read bandwidth.
llama.cpp takes part where xllamacpp and gguf are installed; its files go to a temporary folder.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any, Final

import click
from attrs import asdict

from _generation.child import BFLOAT16, LLAMA_CPP, measure_contender
from _generation.gguf_file import BLOCK, BLOCK_BYTES, write_random_gguf
from _generation.shapes import SHAPES, GenerationShape
from _kernels.limits import cache_size, read_limit
from arb_ternary.cli.options import as_json
from harness import llama_cpp, script
from harness.machine import describe, load_average, machine_facts, with_threads
from harness.table import Column, Record, ResultTable, mebibytes, number, percent, ratio
from harness.timing import measure

#: Contenders whose rates the others are compared with.
_BASELINES: Final = ("tq2_0", BFLOAT16)

#: What the rounds of a contender gave in a case.
Samples = list[dict[str, Any]]


def title(contender: str) -> str:
    """Return the name of a contender in the table."""
    if contender in LLAMA_CPP:
        return f"llama.cpp {LLAMA_CPP[contender]}"
    return "torch bfloat16" if contender == BFLOAT16 else contender


def obstacle(contender: str, shape: GenerationShape) -> str | None:
    """Return why a contender cannot take part here, or None."""
    if contender not in LLAMA_CPP:
        return None
    if shape.width % BLOCK or shape.feed_forward % BLOCK:
        return f"its rows are blocks of {BLOCK} weights"
    return llama_cpp.missing()


def bytes_per_weight(contender: str) -> float:
    """Return the size of a weight, scales included."""
    if contender in LLAMA_CPP:
        return BLOCK_BYTES[LLAMA_CPP[contender]] / BLOCK
    return 2.0 if contender == BFLOAT16 else 1 / 4 + 1 / 128


def read_bandwidth(backends: list[str], seconds: float) -> float:
    """Return how many bytes of memory are read per second."""
    variant = read_limit(backends, cache_size("cpu")).variant
    return variant.nbytes / measure([variant], seconds)[variant.name].least


def measure_shape(
    shape: GenerationShape,
    contenders: list[str],
    cases: list[tuple[int, int]],
    *,
    rounds: int,
    options: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """Measure the contenders in turns; return a row for each in each case.

    Args:
        shape: of the models.
        contenders: that can take part.
        cases: tokens of a prompt, and sequences.
        rounds: turns of every contender.
        options: see :func:`~_generation.child.measure_contender`.

    Raises:
        ArbError: a contender's process fails.
    """
    samples: dict[tuple[str, int], Samples] = {}
    with tempfile.TemporaryDirectory(prefix="arb-benchmarks-") as folder:
        for _, name in product(range(rounds), contenders):
            file = Path(folder) / f"{name}.gguf"
            if name in LLAMA_CPP and not file.exists():
                longest = max(prompt for prompt, _ in cases) + options["new_tokens"]
                write_random_gguf(file, shape, LLAMA_CPP[name], longest)
            found = measure_contender(name, shape.name, cases, file=str(file), **options)
            for number_of_case, one in enumerate(found):
                samples.setdefault((name, number_of_case), []).append(one)
            script.say(f"{shape.name}: {title(name)}")
    rows = []
    for number_of_case, (prompt, batch) in enumerate(cases):
        rows += _with_ratios(
            [_row(shape, name, prompt, batch, samples[name, number_of_case]) for name in contenders]
        )
    return rows


def _row(
    shape: GenerationShape, name: str, prompt: int, batch: int, samples: Samples
) -> dict[str, Any]:
    reading = statistics.median(time for one in samples for time in one["prompt_seconds"])
    writing = statistics.median(time for one in samples for time in one["token_seconds"])
    return {
        "shape": shape.name,
        "prompt": prompt,
        "batch": batch,
        "contender": name,
        "name": title(name),
        "prefill_tokens_per_second": batch * prompt / reading,
        "decode_tokens_per_second": batch / writing,
        "first_token_seconds": reading,
        "bytes_per_second": bytes_per_weight(name) * shape.weights_read() / writing,
        "resident_bytes": max(one["resident_bytes"] for one in samples),
        "base_bytes": samples[0]["base_bytes"],
    }


def _with_ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add to each row of a case how many times as fast it is as the baselines."""
    by_name = {row["contender"]: row for row in rows}
    for row in rows:
        for what in ("prefill", "decode"):
            key = f"{what}_tokens_per_second"
            theirs = {name: by_name.get(name) for name in _BASELINES}
            row[f"{what}_ratio"] = {
                name: other and row[key] / other[key] for name, other in theirs.items()
            }
    return rows


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def notes(result: Record) -> list[str]:
    """Return what a reader of the table has to know."""
    measured = ""
    if result["read_bandwidth"]:
        rate = number(result["read_bandwidth"], 1, 1e-9)
        measured = f" and {rate} GB/s, measured beside the rest"
    lines = [
        f"Random weights and prompts, the likeliest token each time, {result['new_tokens']} new "
        "tokens per sequence, the first of which comes with the prompt; medians over tokens and "
        f"repetitions. {describe(result['machine'])} llama.cpp: "
        f"{result['llama_cpp'] or 'not installed'}.",
        "Share of the read bandwidth: bytes of the weights that a pass reads whole, over its time"
        f"{measured}; weights that a cache holds can exceed it. Memory is that of the process "
        "beyond what its libraries hold.",
    ]
    for shape in result["shapes"]:
        millions = number(shape["weights"], 1, 1e-6)
        lines.append(f"{shape['name']}: {shape['what']}, {millions} million weights.")
    lines.extend(
        f"{each['shape']}: {each['name']} is left out: {each['reason']}."
        for each in result["excluded"]
    )
    return lines


TABLE = ResultTable(
    columns=(
        Column("model", lambda row: row["shape"], left=True),
        Column("prompt x batch", lambda row: f"{row['prompt']} x {row['batch']}", left=True),
        Column("program", lambda row: row["name"], left=True),
        Column("prefill tokens/s", lambda row: _rate(row["prefill_tokens_per_second"])),
        Column("x TQ2_0", lambda row: ratio(row["prefill_ratio"]["tq2_0"])),
        Column("decode tokens/s", lambda row: _rate(row["decode_tokens_per_second"])),
        Column("x TQ2_0", lambda row: ratio(row["decode_ratio"]["tq2_0"])),
        Column("first token ms", lambda row: number(row["first_token_seconds"], 0, 1e3)),
        Column("of read bandwidth", lambda row: percent(row["of_read_bandwidth"])),
        Column("memory MiB", lambda row: mebibytes(row["resident_bytes"] - row["base_bytes"])),
    ),
    records=lambda result: result["rows"],
    notes=notes,
)


@click.command(help=__doc__)
@script.comma_list("--shapes", "0.6m,125m,1b,2b", SHAPES.__getitem__, f"Of {', '.join(SHAPES)}.")
@script.comma_list("--prompts", "128,512", script.count, "Tokens per prompt.")
@script.comma_list("--batches", "1,8", script.count, "Sequences at a time.")
@click.option("--new-tokens", default=128, show_default=True, help="Tokens of each sequence.")
@script.comma_list(
    "--contenders", "", str, f"Backends, {', '.join(LLAMA_CPP)}, {BFLOAT16}; default: cpu and all."
)
@script.threads
@script.seconds(5.0, "Seconds for each case of a contender, in each round.")
@click.option("--rounds", default=2, show_default=True, help="Turns of every contender.")
@script.out
@as_json
def main(
    shapes: tuple[GenerationShape, ...],
    prompts: tuple[int, ...],
    batches: tuple[int, ...],
    new_tokens: int,
    contenders: tuple[str, ...],
    threads: int | None,
    seconds: float,
    rounds: int,
    out: Path | None,
    as_json: bool,
) -> None:
    """Measure and show."""
    names = contenders or (*script.usable_backends("cpu")[:1], *LLAMA_CPP, BFLOAT16)
    backends = [name for name in names if name not in (*LLAMA_CPP, BFLOAT16)]
    rows = []
    excluded = []
    bandwidth = 0.0
    with with_threads(threads) as count:
        facts = machine_facts()
        options = {"new_tokens": new_tokens, "threads": count, "seconds": seconds}
        for shape in shapes:
            able = []
            for name in names:
                reason = obstacle(name, shape)
                if reason is None:
                    able.append(name)
                else:
                    excluded.append({"shape": shape.name, "name": title(name), "reason": reason})
            cases = list(product(prompts, batches))
            bandwidth = max(bandwidth, read_bandwidth(backends, seconds))
            rows += measure_shape(shape, able, cases, rounds=rounds, options=options)
    for row in rows:
        row["of_read_bandwidth"] = row["bytes_per_second"] / bandwidth
    result = {
        "machine": {**facts, "load_average_at_end": load_average()},
        "llama_cpp": llama_cpp.library_version(),
        "new_tokens": new_tokens,
        "read_bandwidth": bandwidth,
        "shapes": [{**asdict(shape), "weights": shape.weights()} for shape in shapes],
        "excluded": excluded,
        "rows": rows,
    }
    script.finish(result, TABLE, out, as_json=as_json)


if __name__ == "__main__":
    script.main(main)
