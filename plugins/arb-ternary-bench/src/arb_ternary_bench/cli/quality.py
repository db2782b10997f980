"""``arb bench quality``: what each rule learns from the same tokens, tuned alike, and what state it
needs for that.
"""

from __future__ import annotations

from pathlib import Path

import click

from arb_ternary.cli.options import as_json, plugin_files
from arb_ternary.cli.output import print_json, print_table
from arb_ternary.plugins.manager import manager
from arb_ternary_bench.quality.sizes import SIZES


def _names(
    _context: click.Context, _parameter: click.Parameter, text: str | None
) -> tuple[str, ...]:
    """The recipes that ``--rules`` names, each once; all of them without it."""
    registry = manager().registry
    if text is None:
        return registry.names("recipe")
    names = dict.fromkeys(name for name in (part.strip() for part in text.split(",")) if name)
    if not names:
        raise click.BadParameter("it names no recipe")
    for name in names:
        registry.get("recipe", name)
    return tuple(names)


@click.command()
@plugin_files
@click.option(
    "--rules", metavar="NAME,NAME...", callback=_names, help="Recipes to measure; default: all."
)
@click.option(
    "--seeds",
    default=3,
    show_default=True,
    type=click.IntRange(min=1),
    help="Train with seeds 0 .. N - 1.",
)
@click.option(
    "--size",
    "size_name",
    default="small",
    show_default=True,
    type=click.Choice(list(SIZES)),
    help="Model.",
)
@click.option(
    "--tokens", type=click.IntRange(min=1), help="Tokens of a final run; default: the size's."
)
@click.option(
    "--tuning-tokens",
    type=click.IntRange(min=1),
    help="Tokens of a tuning run; default: the size's.",
)
@click.option(
    "--jobs", default=1, show_default=True, type=click.IntRange(min=1), help="Runs at once."
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="The study's folder; default: runs/quality-SIZE.",
)
@as_json
def quality(
    rules: tuple[str, ...],
    seeds: int,
    size_name: str,
    tokens: int | None,
    tuning_tokens: int | None,
    jobs: int,
    out: Path | None,
    as_json: bool,
) -> None:
    """Train every recipe on the same tokens and print what each reached, with how much state.

    Each recipe has four trials on the end of the training text; the best one is trained with every
    seed. A study that was stopped or killed goes on when the same command is given again; finished
    runs are not repeated.
    """
    from arb_ternary_bench.quality.result import COLUMNS, rows
    from arb_ternary_bench.quality.study import QualityStudy, run_study
    from arb_ternary_train.directory import RUNS

    size = SIZES[size_name]
    study = QualityStudy(
        folder=RUNS / f"quality-{size_name}" if out is None else out,
        rules=rules,
        size=size,
        seeds=seeds,
        tokens=size.tokens if tokens is None else tokens,
        tuning_tokens=size.tuning_tokens if tuning_tokens is None else tuning_tokens,
        jobs=jobs,
    )
    result = run_study(study, say=lambda line: click.echo(line, err=True))
    if as_json:
        print_json(result)
        return
    print_table(COLUMNS, rows(result))
    click.echo(f"{study.folder}: result.json, table.md, loss.png, frontier.png")
