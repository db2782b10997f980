"""``arb bench step``: one whole training step, in time and memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import click

from arb_ternary.cli.options import as_json, plugin_files
from arb_ternary.cli.output import print_json
from arb_ternary_bench.cli.bench_kernels import backend_names, device_name, parse_shape
from arb_ternary_bench.cli.report import report, write_result


def _shape(
    _context: click.Context, _parameter: click.Parameter, text: str | None
) -> tuple[int, int] | None:
    return None if text is None else parse_shape(text)


def _group(_context: click.Context, _parameter: click.Parameter, text: str) -> Any:
    return "row" if text == "row" else int(text)


def _model(_context: click.Context, _parameter: click.Parameter, name: str | None) -> Any:
    from arb_ternary_bench.steps.large_model import MODELS

    if name is not None and name not in MODELS:
        raise click.BadParameter(f"{name!r} is not one of {', '.join(MODELS)}")
    return None if name is None else MODELS[name]


@click.command()
@plugin_files
@click.option(
    "--device",
    default="cpu",
    show_default=True,
    callback=device_name,
    is_eager=True,
    metavar="cpu|cuda|cuda:N",
    help="Where the steps run.",
)
@click.option(
    "--shape",
    metavar="NxK",
    callback=_shape,
    help="Linear, default 4096x4096; with --block HIDDENxWIDTH.",
)
@click.option("--m", "rows", type=click.IntRange(min=1), help="Tokens of a step; default: 512.")
@click.option(
    "--group",
    default="128",
    show_default=True,
    callback=_group,
    type=click.Choice(["32", "64", "128", "256", "row"]),
    help="Weights that share an exponent.",
)
@click.option(
    "--block", is_flag=True, help="A decoder block instead of a linear; default shape 2816x1024."
)
@click.option(
    "--model",
    metavar="7b|1b|tiny",
    callback=_model,
    help="Steps of a whole model instead, ternary only.",
)
@click.option(
    "--layers", type=click.IntRange(min=1), help="With --model: fewer layers than it has."
)
@click.option(
    "--steps", type=click.IntRange(min=1), help="With --model: optimizer steps; default: 3."
)
@click.option(
    "--gradients", type=click.Choice(["float", "int8"]), help="With --model; default: float."
)
@click.option(
    "--backends",
    metavar="NAME,...",
    callback=backend_names,
    help="Default: all that the device can use.",
)
@click.option("--no-compile", is_flag=True, help="Leave out the baseline that needs a compiler.")
@click.option("--threads", type=click.IntRange(min=1), help="Default: torch's.")
@click.option(
    "--seconds",
    type=click.FloatRange(min=0, min_open=True),
    help="For each way of training; default: 5.",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for result.json and the table.",
)
@as_json
def step(
    device: str,
    shape: tuple[int, int] | None,
    rows: int | None,
    group: Any,
    block: bool,
    model: Any,
    layers: int | None,
    steps: int | None,
    gradients: Literal["float", "int8"] | None,
    backends: tuple[str, ...],
    no_compile: bool,
    threads: int | None,
    seconds: float | None,
    out: Path | None,
    as_json: bool,
) -> None:
    """Time a training step (forward, backward, update) and measure its peak memory.

    Of a linear or a block: every backend with scaled votes, bfloat16 with fused AdamW, and
    quantisation-aware training of BitNet, eager and compiled, in turns; memory in a process of its
    own for each. With --model: real steps of a whole decoder that is ternary throughout.
    """
    for_model = {"--layers": layers, "--steps": steps, "--gradients": gradients}
    elsewhere = None if device == "cpu" else device
    for_parts = {
        "--shape": shape,
        "--m": rows,
        "--block": block or None,
        "--seconds": seconds,
        "--device": elsewhere,
    }
    for_parts["--no-compile"] = no_compile or None
    for option, value in (for_parts if model is not None else for_model).items():
        if value is not None:
            raise click.UsageError(
                f"{option} {'cannot be combined with' if model is not None else 'needs'} --model"
            )
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    if model is not None:
        _run_model(
            model,
            layers,
            steps or 3,
            gradients or "float",
            group,
            backends[0],
            threads,
            out,
            as_json,
        )
        return
    from arb_ternary_bench.steps import result as table
    from arb_ternary_bench.steps.bench import StepBench, run_step_bench
    from arb_ternary_bench.steps.trainees import StepShape

    out_features, in_features = shape or ((2816, 1024) if block else (4096, 4096))
    bench = StepBench(
        shape=StepShape(
            out_features=out_features,
            in_features=in_features,
            rows=rows or 512,
            group_size=group,
            block=block,
            device=device,
        ),
        backends=backends,
        compiled=not no_compile,
        threads=threads,
        seconds=seconds or 5.0,
    )
    result = run_step_bench(bench, say=lambda line: click.echo(line, err=True))
    write_result(result, table, out)
    report(result, table, as_json=as_json)


def _run_model(
    model: Any,
    layers: int | None,
    steps: int,
    gradients: Literal["float", "int8"],
    group: Any,
    backend: str,
    threads: int | None,
    out: Path | None,
    as_json: bool,
) -> None:
    from attrs import evolve

    from arb_ternary_bench.steps.large_model import LargeRun, model_lines, run_large_model
    from arb_ternary_train.directory import write_json

    run = LargeRun(
        model=model if layers is None else evolve(model, layers=layers),
        backend=backend,
        steps=steps,
        group_size=group,
        gradients=gradients,
        threads=threads,
    )
    result = run_large_model(run, say=lambda line: click.echo(line, err=True))
    if out is not None:
        write_json(out / "result.json", result)
    if as_json:
        print_json(result)
        return
    for line in model_lines(result):
        click.echo(line)
