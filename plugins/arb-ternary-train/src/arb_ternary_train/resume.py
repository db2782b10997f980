"""Finds the directory of a run, and the checkpoint that it continues from."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from attrs import evolve

from arb_ternary.errors import CheckpointError, UsageProblem
from arb_ternary_train.checkpoint import Checkpoint, CheckpointStore, read_checkpoint
from arb_ternary_train.config import RunConfig
from arb_ternary_train.directory import RUNS, RunDirectory
from arb_ternary_train.identity import differences
from arb_ternary_train.restarts import restart_memory
from arb_ternary_train.world import World

if TYPE_CHECKING:
    from arb_ternary_train.runner import RunRequest

_LOG = logging.getLogger(__name__)

#: How many differing settings an error lists.
_LISTED: Final = 8


def after_restart(request: RunRequest, world: World) -> RunRequest:
    """Return ``request``, changed to a resume if a launcher has restarted the processes.

    When a machine joins or leaves, torchrun restarts the processes without counting it as a
    restart. A run that was refused had not begun.
    """

    def recall() -> tuple[str | None, int]:
        memory = restart_memory()
        return memory.begin_run(), memory.restarts

    begun, restarts = world.run_on_main(recall)
    if begun:
        return evolve(request, directory=Path(begun), resume="auto")
    unknown = begun is None and restarts > 0
    if unknown and request.directory is not None and request.resume is None:
        return evolve(request, resume="auto")
    return request


def locate_run(
    config: RunConfig, request: RunRequest, world: World
) -> tuple[RunDirectory, Path | None]:
    """Return the run's directory, and the checkpoint that the caller named. Collective.

    Raises:
        UsageProblem: the directory is taken, or belongs to another run.
        CheckpointError: the path to resume from does not exist.
    """

    def locate() -> tuple[str, str | None]:
        files, named = _locate(config, request)
        # A restart repeats this request until the checkpoints after a named one are set aside.
        if named is None:
            restart_memory().store_directory(str(files.path))
        return str(files.path), None if named is None else str(named)

    path, named = world.run_on_main(locate)
    return RunDirectory(Path(path)), None if named is None else Path(named)


def _locate(config: RunConfig, request: RunRequest) -> tuple[RunDirectory, Path | None]:
    """Return the run's directory, and the checkpoint that the caller named, on rank 0."""
    directory = request.directory
    if request.resume is None and request.restart:
        files = RunDirectory(RUNS / config.name if directory is None else directory)
        if files.exists():
            _LOG.warning("%s: set aside as %s", files.path, files.set_aside())
        return files, None
    if request.resume is None:
        if directory is None:
            return RunDirectory.unused(config.name), None
        if RunDirectory(directory).exists():
            raise UsageProblem(
                f"{directory}: a run was started here already",
                f"Continue it with --resume, or choose another directory: --run-dir {directory}-2",
            )
        return RunDirectory(directory), None
    if request.resume == "auto":
        if directory is not None:
            return RunDirectory(directory), None
        return RunDirectory.newest(config.name) or RunDirectory.unused(config.name), None

    path = Path(request.resume)
    if RunDirectory(path).exists():
        found = RunDirectory.existing(path)
        named = CheckpointStore(found.checkpoints).latest()
    elif path.is_dir():
        found = RunDirectory.existing(path.resolve().parent.parent)
        named = path
    else:
        raise CheckpointError(
            f"{path}: there is no checkpoint folder and no run directory of this name"
        )
    if directory is not None and directory.resolve() != found.path.resolve():
        raise UsageProblem(
            f"--resume {path}: that checkpoint belongs to {found.path}, not to {directory}",
            "Leave --run-dir out; to start another run from its weights use --init-from.",
        )
    return found, named


def choose_checkpoint(
    store: CheckpointStore, request: RunRequest, named: Path | None, world: World
) -> Checkpoint | None:
    """Return the checkpoint to continue from, if any. Collective.

    Rank 0 chooses it and sets newer ones aside.

    Raises:
        CheckpointError: the named checkpoint is damaged.
    """
    if request.resume is None:
        return None
    read: list[Checkpoint] = []

    def choose() -> str | None:
        checkpoint = store.newest_good()[0] if named is None else read_checkpoint(named)
        if checkpoint is None:
            return None
        if named is not None:
            store.set_aside_newer(named)
            restart_memory().store_directory(str(store.root.parent))
        read.append(checkpoint)
        return str(checkpoint.path)

    path = world.run_on_main(choose)
    if path is None:
        return None
    return read[0] if read else read_checkpoint(Path(path))


def check_same_run(checkpoint: Checkpoint, identity: Mapping[str, Any]) -> None:
    """Check that ``checkpoint`` was written by a run of this ``identity``.

    Raises:
        CheckpointError: it was not; the settings that differ are listed.
    """
    if "imported" in checkpoint.identity:
        run = checkpoint.path.parent.parent
        raise CheckpointError(
            f"{checkpoint.path}: the model was imported here, and there is no training to continue",
            f"Start from its weights: arb train {run}/config.yaml --init-from {run} --run-dir "
            f"{run}-tuned",
        )
    lines = differences(checkpoint.identity, identity)
    if lines:
        hint = (
            "Resume with the run's own config.yaml; to start a new run from its weights use "
            "--init-from."
        )
        raise CheckpointError(
            f"{checkpoint.path}: it belongs to another run: {len(lines)} settings differ",
            "\n".join([*lines[:_LISTED], hint]),
        )
