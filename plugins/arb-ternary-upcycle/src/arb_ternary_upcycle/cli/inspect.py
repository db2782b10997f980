"""``arb upcycle inspect``: say what upcycling would make of a model."""

from __future__ import annotations

import click

from arb_ternary.cli.options import as_json, plugin_files
from arb_ternary.cli.output import print_json, print_table


@click.command()
@click.argument("model")
@plugin_files
@as_json
def inspect(model: str, as_json: bool) -> None:
    """Say what upcycling would make of MODEL: sizes, linears that become ternary, memory, and how
    heads can split.
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
    rows = [
        (key.replace("_", " "), f"{value:,}" if isinstance(value, int) else value)
        for key, value in teacher.items()
    ]
    print_table(("teacher", model), rows)
    click.echo()
    print_table(
        ("becomes ternary", "shape", "weights of all blocks", "bits a weight", "in training"),
        [
            (
                row["name"],
                " x ".join(map(str, row["shape"])),
                f"{row['weights']:,}",
                f"{row['bits']:.2f}",
                f"{row['training_bits']:.2f}",
            )
            for row in found["linears"]
        ],
    )
    click.echo()
    print_table(
        ("phase", "weights in memory", "on disk"),
        [
            (row["phase"], format_bytes(row["memory"]), format_bytes(row["disk"]))
            for row in found["stages"]
        ],
    )
    click.echo()
    if found["decoupled"]:
        print_table(
            ("--attention dba", "--sem-dim", "--geo-dim", "cache of keys and values"),
            [
                ("", row["sem_dim"], row["geo_dim"], f"{row['of_teacher']:.1%}")
                for row in found["decoupled"]
            ],
        )
    else:
        click.echo("--attention dba: not possible, for the teacher normalises queries and keys")
    for note in notes:
        click.echo(f"note: {note}", err=True)
