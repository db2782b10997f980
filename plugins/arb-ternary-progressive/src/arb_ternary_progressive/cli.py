"""``arb progressive``: what a growing model will need."""

from __future__ import annotations

from pathlib import Path

import click

from arb_ternary.cli.options import as_json, overrides, plugin_files
from arb_ternary.cli.output import print_json, print_table

__all__ = ["progressive"]


@click.group()
def progressive() -> None:
    """Plan runs that grow a model stack by stack."""


@progressive.command("plan")
@click.argument("config", type=click.Path(path_type=Path))
@overrides
@click.option("--target-stacks", type=click.IntRange(min=1), help="For a config of training in Python: stacks in all.")
@click.option("--batch-size", type=click.IntRange(min=1), help="Likewise: samples in a batch; default: 16.")
@click.option("--block-size", type=click.IntRange(min=1), help="Likewise: positions of a sample; default: 128.")
@click.option("--samples", type=click.IntRange(min=1), help="Likewise: samples in the data, for the cache.")
@plugin_files
@as_json
def plan(
    config: Path,
    overrides: tuple[str, ...],
    target_stacks: int | None,
    batch_size: int | None,
    block_size: int | None,
    samples: int | None,
    as_json: bool,
) -> None:
    """Print what each stack of CONFIG will be: depth, parameters, memory, time. Nothing is trained."""
    from arb_ternary_progressive.plan_config import plan_file

    stages = plan_file(
        config,
        overrides,
        target_stacks=target_stacks,
        batch_size=batch_size,
        block_size=block_size,
        samples=samples,
    )
    if as_json:
        print_json([stage.to_json() for stage in stages])
        return
    columns = (
        "stack",
        "place",
        "blocks",
        "depth",
        "precision",
        "trunk",
        "time step",
        "hidden",
        "parameters",
        "learning",
        "weights",
        "gradients",
        "optimizer",
        "activations",
        "cache",
        "memory",
    )
    rows = [
        (
            stage.index,
            stage.position,
            stage.blocks,
            stage.depth,
            stage.precision,
            stage.trunk,
            "drawn" if stage.time_step is None else stage.time_step,
            "" if stage.hidden_share is None else f"{stage.hidden_share:.0%}",
            f"{stage.parameters:,}",
            f"{stage.trainable:,}",
            *(
                size(value)
                for value in (
                    stage.memory.weights,
                    stage.memory.gradients,
                    stage.memory.optimizer,
                    stage.memory.activations,
                    stage.memory.cache,
                    stage.memory.total,
                )
            ),
        )
        for stage in stages
    ]
    print_table(columns, rows)


def size(nbytes: int) -> str:
    """``512 B``, ``1.5 KiB``, ``20.0 MiB``."""
    amount = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024 or unit == "GiB":
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    raise AssertionError("unreachable")
