"""``arb bench train``: whole training steps of decoders, in every way of training them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from arb_ternary.cli.options import as_json, plugin_files
from arb_ternary_bench.cli import options
from arb_ternary_bench.cli.options import backend_names, counts, finish, members, names, say


def _sizes() -> Any:
    from arb_ternary_bench.training.sizes import SIZES

    return SIZES


@click.command()
@plugin_files
@click.option(
    "--sizes",
    metavar="NAME,...",
    default="demo,512x8,1024x12,2048x4",
    show_default=True,
    callback=members(_sizes),
    help="Decoders.",
)
@click.option(
    "--backends",
    metavar="NAME,...",
    callback=backend_names,
    help="Backends that cast votes; default: all that work here.",
)
@click.option(
    "--trainees",
    metavar="PATTERN,...",
    default="*",
    show_default=True,
    callback=names,
    help="Ways of training, such as cpu/pure/int8 or float32*.",
)
@click.option(
    "--threads",
    metavar="N,...",
    default="1,2",
    show_default=True,
    callback=counts("a number of threads"),
    help="Numbers of threads, each measured.",
)
@click.option("--no-compile", is_flag=True, help="Leave out what needs a compiler.")
@click.option(
    "--profile/--no-profile", default=True, show_default=True, help="Split the steps into parts."
)
@click.option(
    "--clock",
    type=click.Choice(["wall", "processor"]),
    default="wall",
    show_default=True,
    help="processor: time that the process had on a processor, for one thread on a busy machine.",
)
@options.seconds(10.0, "Seconds for each way of training.")
@options.out
@as_json
def train(
    sizes: tuple[Any, ...],
    backends: tuple[str, ...],
    trainees: tuple[str, ...],
    threads: tuple[int, ...],
    no_compile: bool,
    profile: bool,
    clock: str,
    seconds: float,
    out: Path | None,
    as_json: bool,
) -> None:
    """Time whole training steps of decoders, and say which part of a step takes how long.

    Sizes: demo (width 128, 3 layers, 8 x 128 tokens per step), 512x8 (8 x 256 tokens), 1024x12 (4 x
    256), 2048x4 (vocabulary 32,000, 2 x 512) and tiny. Every way of training has a process of its
    own, and they take turns: votes on each backend (NAME, with /pure, /int8 gradients, /bfloat16
    activations), qat, float32 and bfloat16 with AdamW, /compiled or not. Each first has to learn.
    """
    from arb_ternary.errors import UsageProblem
    from arb_ternary_bench.training.bench import TrainBench, run_train_bench
    from arb_ternary_bench.training.result import TABLE
    from arb_ternary_bench.training.trainees import chosen_ways, train_ways

    if clock == "processor" and threads != (1,):
        raise UsageProblem(
            "--clock processor: it adds up the time of all threads", "Give --threads 1 too."
        )
    bench = TrainBench(
        sizes=sizes,
        ways=chosen_ways(train_ways(backends, compiled=not no_compile), trainees),
        threads=threads,
        seconds=seconds,
        profile=profile,
        clock=clock,
    )
    finish(run_train_bench(bench, say=say), TABLE, out, as_json=as_json)
