"""``arb upcycle inspect``: say what upcycling would make of a model."""

from __future__ import annotations

import click

from arb_ternary.cli.options import as_json, plugin_files
from arb_ternary.cli.output import print_json, print_notes, print_table


@click.command()
@click.argument("model", type=click.Path())
@plugin_files
@as_json
def inspect(model: str, as_json: bool) -> None:
    """Say what upcycling would make of MODEL.

    Shows its sizes, the linears that become ternary, the memory of each phase, and how its heads
    can be split.
    """
    from arb_ternary_train.progress import format_bytes
    from arb_ternary_upcycle.recipe.inspection import describe
    from arb_ternary_upcycle.recipe.outline import read_outline

    found = describe(read_outline(model))
    if as_json:
        print_json(found)
        return
    teacher = dict(found["teacher"])
    notes = teacher.pop("notes")
    facts = []
    for key, value in teacher.items():
        facts.append((key.replace("_", " "), f"{value:,}" if isinstance(value, int) else value))
    print_table(("teacher", model), facts)
    click.echo()
    linears = []
    for row in found["linears"]:
        shape = " x ".join(map(str, row["shape"]))
        bits = (f"{row['bits']:.2f}", f"{row['training_bits']:.2f}")
        linears.append((row["name"], shape, f"{row['weights']:,}", *bits))
    print_table(
        ("becomes ternary", "shape", "weights of all blocks", "bits per weight", "in training"),
        linears,
    )
    click.echo()
    stages = [
        (row["phase"], format_bytes(row["memory"]), format_bytes(row["disk"]))
        for row in found["stages"]
    ]
    print_table(("phase", "weights in memory", "on disk"), stages)
    click.echo()
    if found["decoupled"]:
        splits = [
            ("", row["sem_dim"], row["geo_dim"], f"{row['of_teacher']:.1%}")
            for row in found["decoupled"]
        ]
        print_table(
            ("--attention dba", "--sem-dim", "--geo-dim", "cache of keys and values"), splits
        )
    else:
        click.echo("--attention dba: not possible because the teacher normalises queries and keys")
    print_notes(notes)
