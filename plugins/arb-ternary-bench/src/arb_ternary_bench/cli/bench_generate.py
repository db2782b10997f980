"""``arb bench generate``: whole models that read prompts and write tokens."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from arb_ternary.cli.options import as_json, plugin_files
from arb_ternary_bench.cli.lists import named_ones, parse_counts, parse_list
from arb_ternary_bench.cli.report import report, write_result

if TYPE_CHECKING:
    from arb_ternary_bench.generation.cases import ClockName

_SHAPES = "0.6m,125m,1b,2b"


def _shapes(_context: click.Context, _parameter: click.Parameter, text: str) -> tuple[Any, ...]:
    from arb_ternary_bench.generation.shapes import SHAPES

    return named_ones(text, SHAPES)


def _counts(_context: click.Context, _parameter: click.Parameter, text: str) -> tuple[int, ...]:
    return parse_counts(text, "a whole number of at least 1")


def _contenders(
    _context: click.Context, _parameter: click.Parameter, text: str | None
) -> tuple[str, ...]:
    from arb_ternary.backends.select import BackendRequest, candidates, select
    from arb_ternary_bench.generation.contenders import BFLOAT16, INT8_CACHE, LLAMA_CPP

    others = (*LLAMA_CPP, BFLOAT16)
    if text is None:
        usable = [one.name for one in candidates("cpu") if one.usable and not one.last_resort]
        return (*usable[:1], *others)
    found = []
    for part in parse_list(text):
        backend = part.removesuffix(INT8_CACHE)
        known = part in others
        found.append(
            part
            if known
            else select(BackendRequest(backend, "--contenders", "cpu")).name + part[len(backend) :]
        )
    return tuple(found)


@click.command()
@plugin_files
@click.option(
    "--shapes",
    default=_SHAPES,
    show_default=True,
    metavar="NAME,...",
    callback=_shapes,
    help="Models: 0.6m, 125m, 1b, 2b, 7b, tiny.",
)
@click.option(
    "--prompts",
    default="128,512",
    show_default=True,
    metavar="N,...",
    callback=_counts,
    help="Tokens of a prompt.",
)
@click.option(
    "--batches",
    default="1,8",
    show_default=True,
    metavar="N,...",
    callback=_counts,
    help="Sequences.",
)
@click.option(
    "--new-tokens",
    default=128,
    show_default=True,
    type=click.IntRange(min=2),
    help="That each sequence gets.",
)
@click.option(
    "--contenders",
    metavar="NAME,...",
    callback=_contenders,
    help="Backends (cpu/int8-cache: keys and values as int8), tq2_0, tq1_0, bfloat16; default: the "
    "preferred backend, whose keys and values are floats, and all others.",
)
@click.option(
    "--group",
    default="128",
    show_default=True,
    type=click.Choice(["32", "64", "128", "256", "row"]),
    help="Weights that share an exponent, on backends.",
)
@click.option("--threads", type=click.IntRange(min=1), help="Of every contender; default: torch's.")
@click.option(
    "--seconds",
    default=5.0,
    show_default=True,
    type=click.FloatRange(min=0, min_open=True),
    help="For each case of a contender, in each round.",
)
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
    help="Leave prompts out that would take more seconds.",
)
@click.option(
    "--clock",
    default="wall",
    show_default=True,
    type=click.Choice(["wall", "processor"]),
    help="processor: seconds that one thread computes, for a machine that does something else too.",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for result.json and the table.",
)
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
    """Time whole models that read prompts and write tokens, beside llama.cpp and torch in bfloat16.

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
    from arb_ternary_bench.generation import result as table
    from arb_ternary_bench.generation.bench import GenerateBench, run_generate_bench

    bench = GenerateBench(
        shapes=shapes,
        contenders=contenders,
        prompts=prompts,
        batches=batches,
        new_tokens=new_tokens,
        group_size="row" if group == "row" else int(group),  # type: ignore[arg-type]  # one of those of the option
        threads=threads,
        seconds=seconds,
        rounds=rounds,
        limit=limit,
        clock=clock,
    )
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    result = run_generate_bench(bench, say=lambda line: click.echo(line, err=True))
    write_result(result, table, out)
    report(result, table, as_json=as_json)
