"""What one row costs in a ternary linear of 256 to 1024 when it is a part of a layer's call, beside
llama.cpp.

    python plugins/arb-ternary-bench/studies/layer_calls.py --out layer-calls.json --threads 1 2
    --seconds 0.5

A product of these sizes takes a microsecond or two, which is less than what it takes to ask for it;
nobody asks for one alone. So two decoders are timed that differ in the number of their blocks and
in nothing else, by the least time of a token: what they differ by, over the blocks that one has
more and over seven, is what a linear of ``width x width`` costs with its share of norms, rounding,
attention over a short text, activation, residual additions and threads that meet. Queries, keys,
values, output, gate, up and down are all ``width x width``; llama.cpp runs files of the same sizes,
and both take turns by :func:`~arb_ternary_bench.generation.bench.run_generate_bench`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from arb_ternary_bench.generation.bench import GenerateBench, run_generate_bench
from arb_ternary_bench.generation.shapes import GenerationShape

WIDTHS: Final = (256, 512, 1024)
#: Blocks of the decoders.
FEW = 1
MANY = 9
LINEARS: Final = 7
BASELINE: Final = "tq2_0"
GOAL: Final = 1.2


def shape_of(width: int, layers: int) -> GenerationShape:
    """A llama of square linears."""
    return GenerationShape(
        name=f"{width}x{layers}",
        what=f"a llama of {layers} blocks of square linears",
        width=width,
        layers=layers,
        heads=width // 64,
        kv_heads=width // 64,
        feed_forward=width,
        vocabulary=256,
        tied=True,
    )


def seconds_of_a_linear(rates: Mapping[int, float]) -> float:
    """From tokens a second of one sequence, by the number of blocks."""
    return (1 / rates[MANY] - 1 / rates[FEW]) / (MANY - FEW) / LINEARS


def rows_of(result: Mapping[str, Any], threads: int) -> list[dict[str, Any]]:
    """A row for each width and contender."""
    rates: dict[tuple[int, str], dict[int, float]] = {}
    for row in result["rows"]:
        width, layers = map(int, row["shape"].split("x"))
        rates.setdefault((width, row["contender"]), {})[layers] = row[
            "decode_tokens_per_second_best"
        ]
    return [
        {
            "threads": threads,
            "width": width,
            "contender": name,
            "seconds": seconds_of_a_linear(found),
        }
        for (width, name), found in rates.items()
        if len(found) == len((FEW, MANY))
    ]


def run(threads: tuple[int, ...], seconds: float, rounds: int) -> dict[str, Any]:
    """Everything; the content of the result."""
    rows: list[dict[str, Any]] = []
    machines = []
    for count in threads:
        bench = GenerateBench(
            shapes=tuple(shape_of(width, layers) for width in WIDTHS for layers in (FEW, MANY)),
            contenders=("cpu", BASELINE),
            prompts=(16,),
            batches=(1,),
            new_tokens=48,
            threads=count,
            seconds=seconds,
            rounds=rounds,
        )
        found = run_generate_bench(bench, say=lambda line: print(line, flush=True))
        machines.append(
            {**found["machine"], "llama_cpp": found["llama_cpp"], "excluded": found["excluded"]}
        )
        rows += rows_of(found, count)
    return {
        "machine": machines[0],
        "load_average_at_end": machines[-1]["load_average_at_end"],
        "rows": rows,
    }


def table(result: Mapping[str, Any]) -> str:
    """Microseconds of a linear, and how they compare, as Markdown; what misses the goal is in
    italics.
    """
    found = {
        (row["width"], row["threads"], row["contender"]): row["seconds"] * 1e6
        for row in result["rows"]
    }
    lines = ["| linear | threads | cpu µs | TQ2_0 µs | x TQ2_0 |", "|---|" + "---:|" * 4]
    for width, threads in dict.fromkeys((width, threads) for width, threads, _ in found):
        times = [found.get((width, threads, name)) for name in ("cpu", BASELINE)]
        shown = ["" if each is None else f"{each:.2f}" for each in times]
        ratio = ""
        if times[0] and times[1]:
            ratio = f"{times[1] / times[0]:.2f}"
            ratio = ratio if times[1] / times[0] >= GOAL else f"*{ratio}*"
        lines.append(f"| {width} x {width} | {threads} | {' | '.join(shown)} | {ratio} |")
    machine = result["machine"]
    note = (
        f"One row, weights in the caches; {MANY} blocks less {FEW}, least times. "
        f"{machine['processor']}, {machine['cores']} cores, torch {machine['torch']}, llama.cpp of "
        f"{machine['llama_cpp']}, load average {machine['load_average']} at the start and "
        f"{result['load_average_at_end']} at the end."
    )
    return "\n".join([*lines, "", note])


def main() -> None:
    """Measure and write, or print the table of a result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="result, JSON")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument(
        "--seconds", type=float, default=0.5, help="for each decoder of a contender in a round"
    )
    parser.add_argument("--rounds", type=int, default=1)
    arguments = parser.parse_args()
    result = run(tuple(arguments.threads), arguments.seconds, arguments.rounds)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))


if __name__ == "__main__":
    main()
