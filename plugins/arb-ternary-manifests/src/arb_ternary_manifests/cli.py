"""``arb run``: run the experiments of a manifest."""

from __future__ import annotations

import shlex
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from arb_ternary.cli.options import as_json, overrides, plugin_files
from arb_ternary.cli.output import print_json, print_notes, print_table
from arb_ternary_train.openmp import wait_passively
from arb_ternary_train.progress import format_bytes, format_duration

if TYPE_CHECKING:
    from arb_ternary_manifests.document import ManifestFile
    from arb_ternary_manifests.dry_run import RunForecast
    from arb_ternary_manifests.plan import PlannedRun


@click.command("run")
@click.argument("manifest", type=click.Path(path_type=Path))
@click.option(
    "--target",
    "chosen",
    metavar="NAME",
    multiple=True,
    help="Run a target, or use a variant. Can be repeated.",
)
@overrides
@click.option(
    "--run-dir",
    type=click.Path(path_type=Path),
    help="Where the folders of targets are made; default: runs/NAME.",
)
@click.option("--resume", is_flag=True, help="Continue started runs, and skip finished ones.")
@click.option("--dry-run", is_flag=True, help="Show what would run, and write nothing.")
@click.option("--no-probe", is_flag=True, help="With --dry-run: time no training steps.")
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
    """Run the targets of MANIFEST. Each run of a target starts from the weights of the run before.

    A run's directory is RUN-DIR/TARGET/ID. A failed check ends the manifest with exit code 1.

    Under torchrun (torchrun --nproc_per_node N -m arb_ternary run MANIFEST) N processes train each
    run together, with the results of one process; this needs the package arb-ternary-distributed.
    """
    wait_passively()
    from arb_ternary.errors import UsageProblem
    from arb_ternary_manifests.document import read_manifest
    from arb_ternary_manifests.execution import execute
    from arb_ternary_manifests.plan import plan
    from arb_ternary_train.launcher import require_single_process
    from arb_ternary_train.world import init_world

    if dry_run:
        require_single_process("arb run --dry-run")
    if no_probe and not dry_run:
        raise UsageProblem("--no-probe: nothing is timed without --dry-run")
    if dry_run and resume:
        raise UsageProblem("--resume: a dry run continues nothing", "Give --dry-run or --resume.")

    file = read_manifest(manifest, overrides, chosen)
    print_notes(f"vars.{name} is used nowhere" for name in file.unused)
    directory = run_dir or _default_directory(file)
    if dry_run:
        _show_dry_run(file, directory, probe=not no_probe, as_json=as_json)
        return

    with init_world("cpu") as world:
        # One rank after another: each writes the same tokenizer of a teacher.
        for rank in range(world.size):
            if rank == world.rank:
                planned = plan(file, directory, dry=False, files=lambda target: directory / target)
            world.barrier()
        is_main = world.is_main
    command = ["arb", "run", str(manifest)]
    for name in chosen:
        command += ["--target", name]
    for text in overrides:
        command += ["-o", text]
    command += ["--run-dir", str(directory), "--resume"]
    resume_command = shlex.join(command)
    if is_main:
        _execute_and_show(planned, resume=resume, resume_command=resume_command, as_json=as_json)
        return
    for _ in execute(planned, resume=resume, resume_command=resume_command):
        pass


def _default_directory(file: ManifestFile) -> Path:
    from arb_ternary_train.directory import RUNS

    name = file.manifest.name
    return RUNS / (name if file.variant is None else f"{name}-{file.variant}")


def _execute_and_show(
    planned: list[PlannedRun], *, resume: bool, resume_command: str, as_json: bool
) -> None:
    from arb_ternary_manifests.execution import execute

    for each in planned:
        _show_notes(each)
    shown: list[dict[str, Any]] = []
    try:
        for each, report in execute(planned, resume=resume, resume_command=resume_command):
            facts = {} if report is None else report.to_json()
            shown.append({**_identity(each), **facts})
            if as_json:
                continue
            if report is None:
                click.echo(f"{each.directory}: finished already")
            else:
                print_table((f"{each.target}/{each.id}", report.directory), report.rows())
                click.echo()
    finally:
        if as_json:
            print_json(shown)


def _show_dry_run(file: ManifestFile, directory: Path, *, probe: bool, as_json: bool) -> None:
    from arb_ternary_manifests.dry_run import forecast
    from arb_ternary_manifests.plan import plan

    shown = []
    with tempfile.TemporaryDirectory(prefix="arb-dry-run-") as folder:

        def files(target: str) -> Path:
            path = Path(folder) / target
            path.mkdir(parents=True, exist_ok=True)
            return path

        for each in plan(file, directory, dry=True, files=files):
            _show_notes(each)
            expected = forecast(each.config, probe=probe)
            shown.append({**_identity(each), **expected.to_json()})
            if not as_json:
                title = (f"{each.target}/{each.id}", str(each.directory))
                print_table(title, _forecast_rows(expected))
                click.echo()
    if as_json:
        print_json(shown)


def _identity(each: PlannedRun) -> dict[str, str]:
    return {"target": each.target, "run": each.id, "directory": str(each.directory)}


def _show_notes(each: PlannedRun) -> None:
    print_notes(f"{each.target}/{each.id}: {note}" for note in each.notes)


def _forecast_rows(expected: RunForecast) -> list[tuple[str, str]]:
    layers = "unknown" if expected.layers is None else f"{expected.layers}"
    optimizer = "unknown"
    if expected.optimizer_bytes is not None:
        optimizer = format_bytes(expected.optimizer_bytes)
    parameters = (
        f"{expected.parameters:,}: {expected.ternary_weights:,} ternary, "
        f"{expected.float_parameters:,} float"
    )
    memory = (
        f"{format_bytes(expected.memory_bytes)}: model {format_bytes(expected.model_bytes)}, "
        f"optimizer {optimizer}, float gradients {format_bytes(expected.gradient_bytes)}"
    )
    rows = [
        ("layers", layers),
        ("parameters", parameters),
        ("memory without activations", memory),
    ]
    for phase in expected.phases:
        text = "takes no training steps"
        if phase.steps is not None and phase.tokens is not None:
            text = f"{phase.steps:,} steps, {phase.tokens:,} tokens"
            if phase.seconds is not None:
                text += f", about {format_duration(phase.seconds)}"
        rows.append((f"phase {phase.name}", text))
    rows += [("note", note) for note in expected.notes]
    return rows
