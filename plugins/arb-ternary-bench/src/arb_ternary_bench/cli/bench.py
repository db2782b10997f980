"""``arb bench``: measure side by side."""

from __future__ import annotations

import json
from pathlib import Path

import click

from arb_ternary.cli.options import as_json, overrides
from arb_ternary.cli.output import print_json, print_table
from arb_ternary_bench.cli.bench_generate import generate
from arb_ternary_bench.cli.bench_kernels import kernels
from arb_ternary_bench.cli.bench_network import network
from arb_ternary_bench.cli.bench_step import step
from arb_ternary_bench.cli.bench_train import train
from arb_ternary_bench.cli.quality import quality


@click.group()
def bench() -> None:
    """Measure, side by side and with the machine on record."""


bench.add_command(quality)
bench.add_command(generate)
bench.add_command(kernels)
bench.add_command(network)
bench.add_command(step)
bench.add_command(train)


@bench.command()
@click.argument(
    "configs", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path)
)
@click.option(
    "--seeds",
    default=3,
    show_default=True,
    type=click.IntRange(min=1),
    help="Train with seeds 0 .. N - 1.",
)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the figures to this JSON file too.",
)
@overrides
@as_json
def compare(
    configs: tuple[Path, ...],
    seeds: int,
    out: Path | None,
    overrides: tuple[str, ...],
    as_json: bool,
) -> None:
    """Train several CONFIGS with the same seeds, in turn, and print one table.

    Speed and memory are also given as ratios to the first config: machines differ, ratios less so.
    """
    from arb_ternary.errors import UsageProblem
    from arb_ternary_bench import compare as comparison
    from arb_ternary_train.directory import write_json

    if len({config.stem for config in configs}) != len(configs):
        raise UsageProblem(
            "arb bench compare: two configs have the same file name", "Rename one of them."
        )
    rows = comparison.compare(
        configs, range(seeds), overrides, say=lambda line: click.echo(line, err=True)
    )
    figures = {
        "machine": comparison.machine_facts(),
        "seeds": seeds,
        "overrides": list(overrides),
        "configs": [row.to_json() for row in rows],
    }
    if out is not None:
        write_json(out, figures)
    if as_json:
        print_json(figures)
        return
    first = rows[0]
    print_table(
        (
            "config",
            "validation loss",
            "bigram",
            "parameters",
            "float",
            "state bits a parameter",
            "tokens/s",
            "peak MiB",
        ),
        [
            (
                row.name,
                f"{row.loss:.4f}" + (f" ± {row.spread:.4f}" if seeds > 1 else ""),
                f"{row.bigram_entropy:.4f}",
                f"{row.parameters:,}",
                f"{row.float_parameters:,}",
                f"{row.state_bits_per_parameter:.2f} ({row.state_bytes / first.state_bytes:.2f}x)",
                f"{row.speed:,.0f} ({row.speed / first.speed:.2f}x)",
                f"{max(row.peak_bytes) / 2**20:,.0f} "
                f"({max(row.peak_bytes) / max(first.peak_bytes):.2f}x)",
            )
            for row in rows
        ],
    )
    click.echo(json.dumps(figures["machine"]))
