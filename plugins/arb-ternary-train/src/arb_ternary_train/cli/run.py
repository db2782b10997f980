"""``arb run``: run what a manifest describes."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from arb_ternary.cli.options import as_json, overrides, plugin_files
from arb_ternary.cli.output import print_json, print_table
from arb_ternary_train.openmp import wait_passively
from arb_ternary_train.progress import format_bytes, format_duration

if TYPE_CHECKING:
    from arb_ternary_train.manifest.dry_run import Outlook
    from arb_ternary_train.manifest.plan import PlannedRun
    from arb_ternary_train.report import RunReport


@click.command("run")
@click.argument("manifest", type=click.Path(path_type=Path))
@click.option(
    "--target",
    "chosen",
    metavar="NAME",
    multiple=True,
    help="A variant, or a target. Can be repeated.",
)
@overrides
@click.option(
    "--run-dir",
    type=click.Path(path_type=Path),
    help="Where the targets' folders go; default: runs/NAME.",
)
@click.option(
    "--resume", is_flag=True, help="Continue what is there; runs that are finished are passed over."
)
@click.option("--dry-run", is_flag=True, help="Say what would run, and write nothing.")
@click.option("--no-probe", is_flag=True, help="With --dry-run: time no steps.")
@plugin_files
@as_json
def run(
    manifest: Path,
    chosen: tuple[str, ...],
    overrides: tuple[str, ...],
    run_dir: Path | None,
    resume: bool,
    dry_run: bool,
    no_probe: bool,
    as_json: bool,
) -> None:
    """Run the targets of MANIFEST, each run of a target from the weights of the one before it.

    A run's directory is RUN-DIR/TARGET/ID. A check that fails ends the manifest, with exit code 1.
    """
    wait_passively()
    from arb_ternary.errors import UsageProblem
    from arb_ternary_train.directory import RUNS
    from arb_ternary_train.manifest.document import read_manifest
    from arb_ternary_train.manifest.plan import plan
    from arb_ternary_train.ranks.environment import refuse_several

    refuse_several("arb run")
    if no_probe and not dry_run:
        raise UsageProblem("--no-probe: nothing is timed without --dry-run")
    if dry_run and resume:
        raise UsageProblem("--resume: a dry run continues nothing", "Give --dry-run or --resume.")
    read = read_manifest(manifest, overrides, chosen)
    place = run_dir or RUNS / "-".join(
        [read.manifest.name, *([read.variant] if read.variant else [])]
    )
    for name in read.unused:
        click.echo(f"note: vars.{name} is used nowhere", err=True)
    if dry_run:
        with tempfile.TemporaryDirectory(prefix="arb-dry-run-") as folder:
            planned = plan(read, place, dry=True, files=lambda target: _made(Path(folder) / target))
            _foretell(planned, probe=not no_probe, as_json=as_json)
        return
    planned = plan(read, place, dry=False, files=lambda target: place / target)
    words = [
        "arb run",
        str(manifest),
        *(f"--target {name}" for name in chosen),
        *(f"-o {text}" for text in overrides),
    ]
    _execute(planned, resume, " ".join([*words, f"--run-dir {place} --resume"]), as_json)


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _notes(each: PlannedRun) -> None:
    for note in each.notes:
        click.echo(f"note: {each.target}/{each.id}: {note}", err=True)


def _execute(planned: list[PlannedRun], resume: bool, again: str, as_json: bool) -> None:
    from arb_ternary_train.manifest.execute import execute

    shown: list[dict[str, Any]] = []
    for each in planned:
        _notes(each)
    try:
        for each, report in execute(planned, resume=resume, again=again):
            finished = {"target": each.target, "run": each.id, "directory": str(each.directory)}
            shown.append({**finished, **({} if report is None else report.to_json())})
            if not as_json:
                _show(each, report)
    finally:
        if as_json:
            print_json(shown)


def _show(each: PlannedRun, report: RunReport | None) -> None:
    if report is None:
        click.echo(f"{each.directory}: finished already")
    else:
        print_table((f"{each.target}/{each.id}", report.directory), report.rows())
        click.echo()


def _foretell(planned: list[PlannedRun], *, probe: bool, as_json: bool) -> None:
    from arb_ternary_train.manifest.dry_run import look_ahead

    shown = []
    for each in planned:
        _notes(each)
        outlook = look_ahead(each.config, probe=probe)
        shown.append(
            {
                "target": each.target,
                "run": each.id,
                "directory": str(each.directory),
                **outlook.to_json(),
            }
        )
        if not as_json:
            print_table((f"{each.target}/{each.id}", str(each.directory)), outlook_rows(outlook))
            click.echo()
    if as_json:
        print_json(shown)


def outlook_rows(outlook: Outlook) -> list[tuple[str, str]]:
    """What would run, as rows of text."""
    optimizer = "not known"
    if outlook.optimizer_bytes is not None:
        optimizer = format_bytes(outlook.optimizer_bytes)
    rows = [
        ("layers", "not told by the model" if outlook.layers is None else f"{outlook.layers}"),
        (
            "parameters",
            f"{outlook.parameters:,}: {outlook.ternary_weights:,} ternary, "
            f"{outlook.float_parameters:,} float",
        ),
        (
            "memory beside activations",
            f"{format_bytes(outlook.memory_bytes)}: model {format_bytes(outlook.model_bytes)}, "
            f"optimizer {optimizer}, float gradients {format_bytes(outlook.gradient_bytes)}",
        ),
    ]
    for phase in outlook.phases:
        if phase.steps is None or phase.tokens is None:
            rows.append((f"phase {phase.name}", "takes no training steps"))
        else:
            time = "" if phase.seconds is None else f", about {format_duration(phase.seconds)}"
            rows.append(
                (f"phase {phase.name}", f"{phase.steps:,} steps, {phase.tokens:,} tokens{time}")
            )
    return [*rows, *(("note", note) for note in outlook.notes)]
