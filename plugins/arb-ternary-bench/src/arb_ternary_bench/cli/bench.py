"""``arb bench``: measure side by side."""

from __future__ import annotations

from pathlib import Path

import click

from arb_ternary.cli.options import as_json, overrides
from arb_ternary_bench.cli.generate import generate
from arb_ternary_bench.cli.kernels import kernels
from arb_ternary_bench.cli.options import say
from arb_ternary_bench.cli.train import train


@click.group()
def bench() -> None:
    """Measure, side by side and with the machine on record."""


bench.add_command(generate)
bench.add_command(kernels)
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
    result = comparison.compare(configs, seeds, overrides, say=say)
    if out is not None:
        write_json(out, result)
    comparison.TABLE.show(result, as_json=as_json)
