"""``arb train``: run a config's phases."""

from __future__ import annotations

from pathlib import Path

import click

from arb_ternary.cli.options import as_json, overrides, plugin_files
from arb_ternary.cli.output import print_json, print_table
from arb_ternary_train.openmp import wait_passively

__all__ = ["train"]


@click.command()
@click.argument("config", type=click.Path(path_type=Path))
@overrides
@click.option("--run-dir", type=click.Path(path_type=Path), help="Where to write; default: runs/NAME, made unique.")
@click.option(
    "--resume",
    is_flag=False,
    flag_value="auto",
    metavar="[auto|PATH]",
    help="Continue: from the newest good checkpoint (auto), or from this checkpoint or run directory.",
)
@click.option("--init-from", type=click.Path(path_type=Path), metavar="RUN", help="Start from another run's weights.")
@click.option("--backend", metavar="NAME", help="Kernel backend, over ARB_TERNARY_BACKEND and the config.")
@plugin_files
@as_json
def train(
    config: Path,
    overrides: tuple[str, ...],
    run_dir: Path | None,
    resume: str | None,
    init_from: Path | None,
    backend: str | None,
    as_json: bool,
) -> None:
    """Run the phases of CONFIG.

    A signal (Ctrl-C) saves a checkpoint first; --resume continues from it, bit for bit. The first checkpoint that is
    damaged is passed over by `--resume auto` and refused by `--resume PATH`.
    """
    wait_passively()
    from arb_ternary.errors import ArbError
    from arb_ternary_train.loading import load_config
    from arb_ternary_train.runner import RunRequest
    from arb_ternary_train.runner import train as run

    loaded = load_config(config, overrides)
    if backend is None and loaded.origins["backend",].kind == "override":
        backend = loaded.config.backend  # -o is the command line too, and goes before the environment
    report = run(loaded.config, RunRequest(directory=run_dir, resume=resume, init_from=init_from, backend=backend))
    if as_json:
        print_json({"directory": report.directory, **report.to_json()})
    else:
        print_table(("what the model stores", "elements", "bytes"), report.audit.table())
        click.echo()
        print_table(("run", report.directory), report.rows())
    if report.failed_checks:
        summaries = [f"{name}: {result.summary}" for name, result in report.checks if not result.passed]
        raise ArbError(f"{report.directory}: failed checks: {', '.join(report.failed_checks)}", "\n".join(summaries))
