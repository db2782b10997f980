"""``arb train``: run a config's phases."""

from __future__ import annotations

from pathlib import Path

import click

from arb_ternary.cli.options import as_json, completes, overrides, plugin_files
from arb_ternary_train.freed_memory import keep_freed_memory
from arb_ternary_train.openmp import wait_passively


@click.command()
@click.argument("config", type=click.Path(path_type=Path))
@overrides
@click.option(
    "--steps", type=click.IntRange(min=1), help="Optimizer steps of the config's only phase."
)
@click.option(
    "--batch-size",
    type=click.IntRange(min=1),
    help="Samples in a micro-batch of the config's only phase.",
)
@click.option(
    "--preserve-state",
    is_flag=True,
    help="The config's only phase reads each row as one continuous text, and the model keeps its "
    "state between batches.",
)
@click.option("--device", metavar="NAME", help="Where the model lives: cpu, cuda, cuda:N or mps.")
@click.option(
    "--run-dir",
    type=click.Path(path_type=Path),
    help="Where to write; default: runs/NAME, made unique.",
)
@click.option(
    "--resume",
    is_flag=False,
    flag_value="auto",
    metavar="[auto|PATH]",
    help="Continue: from the newest good checkpoint (auto), or from this checkpoint or run "
    "directory.",
)
@click.option(
    "--restart",
    is_flag=True,
    help="Begin anew; if the run directory exists, it is set aside as DIR.old-1.",
)
@click.option(
    "--init-from",
    type=click.Path(path_type=Path),
    metavar="RUN",
    help="Start from another run's weights.",
)
@click.option(
    "--init-skip",
    multiple=True,
    metavar="PATTERN",
    help="What is not taken from --init-from, by name, such as head: it starts afresh and may have "
    "other shapes.",
)
@click.option(
    "--backend",
    metavar="NAME",
    shell_complete=completes("backend"),
    help="Kernel backend, over ARB_TERNARY_BACKEND and the config.",
)
@plugin_files
@as_json
def train(
    config: Path,
    overrides: tuple[str, ...],
    steps: int | None,
    batch_size: int | None,
    preserve_state: bool,
    device: str | None,
    run_dir: Path | None,
    resume: str | None,
    restart: bool,
    init_from: Path | None,
    init_skip: tuple[str, ...],
    backend: str | None,
    as_json: bool,
) -> None:
    """Run the phases of CONFIG.

    --steps, --batch-size, --preserve-state and --device are short for -o and override it. A signal
    (Ctrl-C) saves a checkpoint first; --resume continues from it, bit for bit. `--resume auto`
    skips damaged checkpoints if an older one is good; `--resume PATH` refuses one.

    Under torchrun (torchrun --nproc_per_node N -m arb_ternary train CONFIG) N processes train
    together, with the results of one process; this needs the package arb-ternary-distributed.
    """
    wait_passively()
    keep_freed_memory()
    from arb_ternary_train.cli.outcome import show_outcome
    from arb_ternary_train.loading import in_only_phase, load_config
    from arb_ternary_train.runner import RunRequest
    from arb_ternary_train.runner import train as run
    from arb_ternary_train.world import init_world

    phase = {
        "steps": steps,
        "batch_size": batch_size,
        "preserve_state": True if preserve_state else None,
    }
    common = [
        *in_only_phase(config, overrides, phase),
        *([] if device is None else [f"device={device}"]),
    ]
    loaded = load_config(config, [*overrides, *common])
    if backend is None and loaded.origins["backend",].kind == "override":
        # -o is the command line too, and takes precedence over the environment.
        backend = loaded.config.backend
    with init_world(loaded.config.device) as world:
        request = RunRequest(
            directory=run_dir,
            resume=resume,
            restart=restart,
            init_from=init_from,
            init_skip=init_skip,
            backend=backend,
            world=world,
        )
        report = run(loaded.config, request)
    if world.is_main:
        show_outcome(report, as_json=as_json)
    report.raise_failed_checks()
