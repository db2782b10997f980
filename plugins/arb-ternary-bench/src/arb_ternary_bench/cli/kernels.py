"""``arb bench kernels``: how fast kernels are, compared with torch's, others' and the limits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from arb_ternary.cli.options import as_json, plugin_files
from arb_ternary_bench.cli import options
from arb_ternary_bench.cli.options import (
    GROUPS,
    backend_names,
    counts,
    finish,
    parse_group,
    parse_list,
    parse_shape,
    say,
)

_SHAPES = "4096x4096,11008x4096,4096x11008,2560x2560,1024x1024,512x512,256x256"
_ROWS = "1,4,16,64,256,512,2048"


def _shapes(
    _context: click.Context, _parameter: click.Parameter, text: str
) -> tuple[tuple[int, int], ...]:
    return tuple(map(parse_shape, parse_list(text)))


def _groups(_context: click.Context, _parameter: click.Parameter, text: str) -> tuple[Any, ...]:
    parts = parse_list(text)
    for part in parts:
        if part not in GROUPS:
            raise click.BadParameter(f"{part!r} is not one of {', '.join(GROUPS)}")
    return tuple(map(parse_group, parts))


def _ops(_context: click.Context, _parameter: click.Parameter, text: str | None) -> tuple[str, ...]:
    from arb_ternary.errors import nearest
    from arb_ternary_bench.kernels.ops import DEFAULT_OPS, OPS

    if text is None:
        return DEFAULT_OPS
    parts = parse_list(text)
    for part in parts:
        if part not in OPS:
            close = nearest(part, OPS)
            suggestion = f"; did you mean {close!r}?" if close else ""
            raise click.BadParameter(f"there is no op {part!r}{suggestion} Ops: {', '.join(OPS)}")
    return tuple(parts)


def _device(_context: click.Context, _parameter: click.Parameter, text: str) -> str:
    from arb_ternary_bench.kernels.gpu import check_device

    device = text.strip().lower()
    check_device(device)
    return device


@click.command()
@plugin_files
@click.option(
    "--device",
    default="cpu",
    show_default=True,
    callback=_device,
    is_eager=True,
    metavar="cpu|cuda|cuda:N",
    help="Where the kernels run.",
)
@click.option(
    "--backends",
    metavar="NAME,...",
    callback=backend_names,
    help="Default: all that the device can use.",
)
@click.option(
    "--shapes",
    metavar="NxK,...",
    default=_SHAPES,
    show_default=True,
    callback=_shapes,
    help="Shapes of weights, outputs by inputs.",
)
@click.option(
    "--m",
    "rows",
    metavar="M,...",
    default=_ROWS,
    show_default=True,
    callback=counts("a number of rows"),
    help="Rows of activations.",
)
@click.option(
    "--group",
    "groups",
    metavar="G,...",
    default="128",
    show_default=True,
    callback=_groups,
    help=f"Weights that share an exponent: {', '.join(GROUPS)}.",
)
@click.option(
    "--ops",
    metavar="OP,...",
    callback=_ops,
    help="Default: both products, votes, flips, quantisation.",
)
@click.option(
    "--cache",
    type=click.Choice(["hot", "cold", "both"]),
    default="both",
    show_default=True,
    help="Weights from the cache, or from memory.",
)
@click.option(
    "--peers",
    default="auto",
    show_default=True,
    metavar="auto|none|NAME,...",
    help="Other libraries.",
)
@options.threads
@options.seconds(0.5, "Seconds for each contender of a cell.")
@options.out
@as_json
def kernels(
    device: str,
    backends: tuple[str, ...],
    shapes: tuple[tuple[int, int], ...],
    rows: tuple[int, ...],
    groups: tuple[Any, ...],
    ops: tuple[str, ...],
    cache: str,
    peers: str,
    threads: int | None,
    seconds: float,
    out: Path | None,
    as_json: bool,
) -> None:
    """Time the kernels of backends, in turns with torch's, with peers and with the limits.

    The limits are what the machine can do: the rate of reading memory, and the peak of its units.
    Every kernel is first checked against an exact result, with outputs that held NaN.
    """
    from arb_ternary_bench.kernels.bench import KernelBench, run_kernel_bench
    from arb_ternary_bench.kernels.peers import choose_peers
    from arb_ternary_bench.kernels.result import TABLE

    bench = KernelBench(
        backends=backends,
        shapes=shapes,
        rows=rows,
        groups=groups,
        ops=ops,
        caches=("hot", "cold") if cache == "both" else (cache,),
        peers=choose_peers(peers, device),
        device=device,
        threads=threads,
        seconds=seconds,
    )
    finish(run_kernel_bench(bench, say=say), TABLE, out, as_json=as_json)
