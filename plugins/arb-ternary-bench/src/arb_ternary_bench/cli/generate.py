"""``arb bench generate``: whole models that read prompts and write tokens."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from arb_ternary.cli.options import as_json, plugin_files
from arb_ternary_bench.cli import options
from arb_ternary_bench.cli.options import (
    GROUPS,
    counts,
    finish,
    members,
    parse_group,
    parse_list,
    say,
    usable_backends,
)

if TYPE_CHECKING:
    from arb_ternary_bench.generation.cases import ClockName

_COUNT = "a whole number of at least 1"


def _shapes() -> Any:
    from arb_ternary_bench.generation.shapes import SHAPES

    return SHAPES


def _contenders(
    _context: click.Context, _parameter: click.Parameter, text: str | None
) -> tuple[str, ...]:
    from arb_ternary.backends.select import BackendRequest, select
    from arb_ternary_bench.generation.contenders import BFLOAT16, LLAMA_CPP, split_cache

    others = (*LLAMA_CPP, BFLOAT16)
    if text is None:
        return (*usable_backends("cpu")[:1], *others)
    found = []
    for part in parse_list(text):
        if part in others:
            found.append(part)
            continue
        backend, ending = split_cache(part)
        selected = select(BackendRequest(backend, "--contenders", "cpu")).name
        found.append(selected + ending)
    return tuple(found)


@click.command()
@plugin_files
@click.option(
    "--shapes",
    default="0.6m,125m,1b,2b",
    show_default=True,
    metavar="NAME,...",
    callback=members(_shapes),
    help="Models: 0.6m, 125m, 1b, 2b, 7b, tiny.",
)
@click.option(
    "--prompts",
    default="128,512",
    show_default=True,
    metavar="N,...",
    callback=counts(_COUNT),
    help="Tokens per prompt.",
)
@click.option(
    "--batches",
    default="1,8",
    show_default=True,
    metavar="N,...",
    callback=counts(_COUNT),
    help="Sequences at a time.",
)
@click.option(
    "--new-tokens",
    default=128,
    show_default=True,
    type=click.IntRange(min=2),
    help="Tokens that each sequence gets.",
)
@click.option(
    "--contenders",
    metavar="NAME,...",
    callback=_contenders,
    help="Backends, tq2_0, q2_0, tq1_0, bfloat16; default: the preferred backend and all others. A "
    "backend keeps keys and values in bfloat16; cpu/float-cache and cpu/int8-cache as computed and "
    "as int8.",
)
@click.option(
    "--group",
    default="128",
    show_default=True,
    type=click.Choice(GROUPS),
    help="Weights that share an exponent, on backends.",
)
@options.threads
@options.seconds(5.0, "Seconds for each case of a contender, in each round.")
@click.option(
    "--rounds",
    default=2,
    show_default=True,
    type=click.IntRange(min=1),
    help="Turns of every contender.",
)
@click.option(
    "--limit",
    default=120.0,
    show_default=True,
    type=click.FloatRange(min=0, min_open=True),
    help="Leave out prompts that would take more seconds.",
)
@click.option(
    "--clock",
    default="wall",
    show_default=True,
    type=click.Choice(["wall", "processor"]),
    help="processor: seconds that one thread computes, for a machine that does something else too.",
)
@options.out
@as_json
def generate(
    shapes: tuple[Any, ...],
    prompts: tuple[int, ...],
    batches: tuple[int, ...],
    new_tokens: int,
    contenders: tuple[str, ...],
    group: str,
    threads: int | None,
    seconds: float,
    rounds: int,
    limit: float,
    clock: ClockName,
    out: Path | None,
    as_json: bool,
) -> None:
    """Time whole models that read prompts and write tokens, with llama.cpp and torch in bfloat16.

    Weights are random. Every contender runs in a process of its own, one at a time, in turns with
    the others and with a measurement of the read bandwidth. llama.cpp takes part where xllamacpp
    (or llama-cpp-python) and gguf are installed; its files are written to a temporary folder.
    """
    import torch

    threads = threads or torch.get_num_threads()
    if clock == "processor" and threads > 1:
        raise click.UsageError(
            "--clock processor needs --threads 1: threads that wait for each other compute too"
        )
    from arb_ternary_bench.generation.bench import GenerateBench, run_generate_bench
    from arb_ternary_bench.generation.result import TABLE

    bench = GenerateBench(
        shapes=shapes,
        contenders=contenders,
        prompts=prompts,
        batches=batches,
        new_tokens=new_tokens,
        group_size=parse_group(group),
        threads=threads,
        seconds=seconds,
        rounds=rounds,
        limit=limit,
        clock=clock,
    )
    finish(run_generate_bench(bench, say=say), TABLE, out, as_json=as_json)
