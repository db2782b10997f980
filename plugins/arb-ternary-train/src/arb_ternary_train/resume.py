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
from arb_ternary_train.growing_batches import joined_at
from arb_ternary_train.identity import changes, differences
from arb_ternary_train.options import StandardConfig
from arb_ternary_train.restarts import restart_memory
from arb_ternary_train.run_state import RunState
from arb_ternary_train.schedules import scheduled_value
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


def check_same_run(
    checkpoint: Checkpoint, identity: Mapping[str, Any], config: RunConfig
) -> int | None:
    """Check that ``checkpoint`` was written by a run of this ``identity``.

    Its last phase may have another number of steps if the steps before the checkpoint do not depend
    on that.

    Returns:
        The number of steps that the last phase had; None if it is the same.

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
    hint = (
        "Resume with the run's own config.yaml; to start a new run from its weights use "
        "--init-from."
    )
    index = len(config.phases) - 1
    changed = changes(checkpoint.identity, identity).get(("config", "phases", index, "steps"))
    options = config.phases[index].options
    if len(lines) == 1 and changed is not None and type(options) is StandardConfig:
        before = int(changed[0])
        reason = _reason_against(checkpoint, options, before)
        if reason is None:
            return before
        hint = f"A run of another length would have taken other steps: {reason}\n{hint}"
    if lines:
        raise CheckpointError(
            f"{checkpoint.path}: it belongs to another run: {len(lines)} settings differ",
            "\n".join([*lines[:_LISTED], hint]),
        )
    return None


def _reason_against(checkpoint: Checkpoint, options: StandardConfig, before: int) -> str | None:
    """Return why the steps that were taken depend on the number of steps; None if they do not.

    Args:
        checkpoint: a checkpoint of the run.
        options: the options of the last phase now.
        before: the number of steps that it had.
    """
    state = RunState.of(checkpoint)
    done = state.step - sum(phase["steps"] for phase in state.finished)
    if done > options.steps or state.phase is None:
        return f"{done} steps are done."
    if options.policy is not None:
        return f"the policy {options.policy.name!r} may know how many there are."
    for step in range(done):
        rates = []
        for steps in (before, options.steps):
            rate = scheduled_value(
                options.lr_schedule,
                step,
                steps=steps,
                warmup=options.warmup_steps,
                peak=1.0,
                floor=0.0,
            )
            rates.append((rate, joined_at(options.batch_doublings or (), step, steps)))
        if rates[0] != rates[1]:
            what = f"lr_schedule {options.lr_schedule!r}"
            if rates[0][0] == rates[1][0]:
                what = "batch_doublings"
            return (
                f"{what} is stretched over all steps, and differs from step {step + 1} on. A run "
                "with lr_schedule constant can be made longer."
            )
    return None
