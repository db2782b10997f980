"""``arb bench network``: what a step sends between machines, computed from sizes."""

from __future__ import annotations

from pathlib import Path

import click

from arb_ternary.cli.options import as_json, overrides
from arb_ternary.cli.output import print_json, print_table


@click.command()
@click.argument("config", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for result.json and the table.",
)
@overrides
@as_json
def network(config: Path, out: Path | None, overrides: tuple[str, ...], as_json: bool) -> None:
    """Compute what a GPU sends in a step, and how long that takes, for the model and machines of
    CONFIG.

    Votes beside DDP, FSDP2, HSDP, PowerSGD and 1-bit Adam. Nothing is measured, and nothing is
    sent: formulas are in docs/explanation/distributed.md, and computation in which transfers could
    hide is not counted.
    """
    from arb_ternary.config.loading import load_as
    from arb_ternary_bench.network.config import NetworkConfig
    from arb_ternary_bench.network.result import COLUMNS, compute, markdown, rows
    from arb_ternary_bench.network.schemes import SUMMARIES
    from arb_ternary_train.directory import write_json

    asked = load_as(NetworkConfig, config, overrides).config
    result = compute(asked)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / "result.json", result)
        (out / "table.md").write_text(markdown(result), encoding="utf-8")
    if as_json:
        print_json(result)
        return
    print_table(COLUMNS, rows(result))
    click.echo(
        f"{result['weights']:,} ternary weights, {result['float_parameters']:,} float parameters"
    )
    for scheme in asked.schemes:
        click.echo(f"{scheme}: {SUMMARIES[scheme]}")
