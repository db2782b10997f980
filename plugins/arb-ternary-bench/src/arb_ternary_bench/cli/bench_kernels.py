"""``arb bench kernels``: how fast kernels are, beside torch's, other people's and the machine's
limits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import click

from arb_ternary.cli.options import as_json, plugin_files
from arb_ternary_bench.cli.lists import parse_counts, parse_list
from arb_ternary_bench.cli.report import report, write_result

_SHAPES = "4096x4096,11008x4096,4096x11008,2560x2560,1024x1024,512x512,256x256"
_ROWS = "1,4,16,64,256,512,2048"


def parse_shape(text: str) -> tuple[int, int]:
    """``NxK``, outputs by inputs."""
    sizes = text.lower().split("x")
    if len(sizes) != 2 or not all(
        size.isascii() and size.isdecimal() and int(size) for size in sizes
    ):
        raise click.BadParameter(f"{text!r} is not NxK, outputs by inputs, such as 4096x4096")
    return int(sizes[0]), int(sizes[1])


def _shapes(
    _context: click.Context, _parameter: click.Parameter, text: str
) -> tuple[tuple[int, int], ...]:
    return tuple(parse_shape(part) for part in parse_list(text))


def _rows(_context: click.Context, _parameter: click.Parameter, text: str) -> tuple[int, ...]:
    return parse_counts(text, "a number of rows")


def _groups(
    _context: click.Context, _parameter: click.Parameter, text: str
) -> tuple[int | Literal["row"], ...]:
    for part in parse_list(text):
        if part not in ("32", "64", "128", "256", "row"):
            raise click.BadParameter(f"{part!r} is not one of 32, 64, 128, 256, row")
    return tuple("row" if part == "row" else int(part) for part in parse_list(text))


def _ops(_context: click.Context, _parameter: click.Parameter, text: str | None) -> tuple[str, ...]:
    from arb_ternary.errors import nearest
    from arb_ternary_bench.kernels.ops import DEFAULT_OPS, OPS

    if text is None:
        return DEFAULT_OPS
    for part in parse_list(text):
        if part not in OPS:
            close = nearest(part, OPS)
            suggestion = f"; did you mean {close!r}?" if close else ""
            raise click.BadParameter(f"there is no op {part!r}{suggestion} Ops: {', '.join(OPS)}")
    return tuple(parse_list(text))


def device_name(_context: click.Context, _parameter: click.Parameter, text: str) -> str:
    """The device that ``--device`` names, which is there."""
    from arb_ternary_bench.kernels.gpu import check_device

    device = text.strip().lower()
    check_device(device)
    return device


def backend_names(
    context: click.Context, _parameter: click.Parameter, text: str | None
) -> tuple[str, ...]:
    """The backends that ``--backends`` names; without it every one that is usable on ``--device``,
    the preferred first.

    Last resorts, such as an interpreter, take part only where they are named.
    """
    from arb_ternary.backends.select import BackendRequest, candidates, select

    device = context.params.get("device", "cpu")
    if text is None:
        return tuple(one.name for one in candidates(device) if one.usable and not one.last_resort)
    return tuple(
        select(BackendRequest(name, "--backends", device)).name for name in parse_list(text)
    )


@click.command()
@plugin_files
@click.option(
    "--device",
    default="cpu",
    show_default=True,
    callback=device_name,
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
    help="Weights.",
)
@click.option(
    "--m", "rows", metavar="M,...", default=_ROWS, show_default=True, callback=_rows, help="Rows."
)
@click.option(
    "--group",
    "groups",
    metavar="G,...",
    default="128",
    show_default=True,
    callback=_groups,
    help="Weights that share an exponent: 32, 64, 128, 256, row.",
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
@click.option("--threads", type=click.IntRange(min=1), help="Of every contender; default: torch's.")
@click.option(
    "--seconds",
    default=0.5,
    show_default=True,
    type=click.FloatRange(min=0, min_open=True),
    help="For each contender of a cell.",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for result.json, table, figure.",
)
@as_json
def kernels(
    device: str,
    backends: tuple[str, ...],
    shapes: tuple[tuple[int, int], ...],
    rows: tuple[int, ...],
    groups: tuple[int | Literal["row"], ...],
    ops: tuple[str, ...],
    cache: str,
    peers: str,
    threads: int | None,
    seconds: float,
    out: Path | None,
    as_json: bool,
) -> None:
    """Time the kernels of backends, in turns with torch's own, with peers and with what the machine
    can do.

    Every kernel is first checked against an exact result, with outputs that held NaN.
    """
    from arb_ternary_bench.kernels import result as table
    from arb_ternary_bench.kernels.bench import KernelBench, run_kernel_bench
    from arb_ternary_bench.kernels.figures import draw_speedups
    from arb_ternary_bench.kernels.peers import choose_peers

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
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    result = run_kernel_bench(bench, say=lambda line: click.echo(line, err=True))
    write_result(result, table, out)
    if out is not None:
        draw_speedups(result, out / "speedup.png")
    report(result, table, as_json=as_json)
