"""Implement ``arb progressive``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from arb_ternary.cli.options import as_json, overrides, plugin_files
from arb_ternary.cli.output import print_json, print_table
from arb_ternary_train.progress import format_bytes

if TYPE_CHECKING:
    from arb_ternary_progressive.plan import StagePlan


@click.group()
def progressive() -> None:
    """Plan runs that grow a model stack by stack."""


@progressive.command("plan")
@click.argument("config", type=click.Path(path_type=Path))
@overrides
@plugin_files
@as_json
def plan(config: Path, overrides: tuple[str, ...], as_json: bool) -> None:
    """Print depth, parameters, memory and time step of each stack of CONFIG. Nothing is trained."""
    from arb_ternary_progressive.plan import GrowthPlan
    from arb_ternary_train.loading import load_config

    stages = GrowthPlan(load_config(config, overrides).config).stages()
    if as_json:
        print_json([stage.to_json() for stage in stages])
        return
    rows = [_row(stage) for stage in stages]
    print_table(list(rows[0]), [list(row.values()) for row in rows])


def _row(stage: StagePlan) -> dict[str, object]:
    """Return the row of a stack, by column."""
    memory = stage.memory
    return {
        "stack": stage.index,
        "place": stage.position,
        "blocks": stage.blocks,
        "depth": stage.depth,
        "precision": stage.precision,
        "trunk": stage.trunk,
        "time step": "drawn" if stage.time_step is None else stage.time_step,
        "hidden": "" if stage.hidden_share is None else f"{stage.hidden_share:.0%}",
        "parameters": f"{stage.parameters:,}",
        "learning": f"{stage.trainable:,}",
        "weights": format_bytes(memory.weights),
        "gradients": format_bytes(memory.gradients),
        "optimizer": format_bytes(memory.optimizer),
        "activations": format_bytes(memory.activations),
        "cache": format_bytes(memory.cache),
        "memory": format_bytes(memory.total),
    }
