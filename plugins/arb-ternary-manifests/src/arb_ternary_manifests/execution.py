"""Train the runs of a manifest, one after another; skip those that are finished on a resume.

Of several processes that a launcher has started, rank 0 decides what is done already, because it
alone writes the runs' directories.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from arb_ternary.config.fields import to_plain
from arb_ternary.errors import ArbError, Interrupted, UsageProblem
from arb_ternary_manifests.plan import PlannedRun
from arb_ternary_train.auto_rate import CHOSEN, resolve_auto_rate
from arb_ternary_train.config import RunConfig
from arb_ternary_train.directory import RunDirectory
from arb_ternary_train.identity import RUNTIME_KEYS
from arb_ternary_train.loading import load_config
from arb_ternary_train.report import RunReport
from arb_ternary_train.restarts import restart_memory
from arb_ternary_train.runner import RunRequest, train
from arb_ternary_train.world import World, init_world

#: Settings that may differ between a finished run and the planned one.
_MAY_DIFFER: Final = RUNTIME_KEYS - {"data", "checks"}


def execute(
    runs: Sequence[PlannedRun], *, resume: bool, resume_command: str
) -> Iterator[tuple[PlannedRun, RunReport | None]]:
    """Train ``runs`` in order, and yield each with its report; None if it was finished before.

    Args:
        runs: the runs of one manifest.
        resume: whether to continue runs that were started.
        resume_command: the command that continues, shown to a user who interrupts it.

    Raises:
        UsageProblem: a run was started before, and ``resume`` is False.
        Interrupted: SIGINT or SIGTERM came; a checkpoint has been saved.
        ArbError: any error of a run; a failed check ends the manifest.
    """
    with init_world("cpu") as world:
        resume = world.run_on_main(lambda: _is_resume(runs, resume, resume_command))
    for run in runs:
        with init_world(run.config.device) as world:
            report = _train_unfinished(run, world, resume, resume_command)
        yield run, report
        if report is not None:
            report.raise_failed_checks()


def _is_resume(runs: Sequence[PlannedRun], resume: bool, resume_command: str) -> bool:
    """Return whether to continue runs that were started: as asked for, or after a restart.

    Raises:
        UsageProblem: a run was started before, and is not to be continued.
    """
    memory = restart_memory()
    # The memory has the manifest as its first run, before the runs themselves.
    begun = memory.begin_run()
    if begun or (begun is None and memory.restarts > 0):
        return True
    for run in runs:
        if not resume and RunDirectory(run.directory).exists():
            raise UsageProblem(
                f"{run.directory}: a run was started here already",
                f"Continue it with: {resume_command}\nor choose another directory with --run-dir.",
            )
    memory.store_directory(str(runs[0].directory))
    return resume


def _train_unfinished(
    run: PlannedRun, world: World, resume: bool, resume_command: str
) -> RunReport | None:
    """Train ``run`` and return its report; None if it was finished before. Collective."""
    if resume and world.run_on_main(lambda: is_finished(run)):
        # A restarted process counts the same runs, also those that it does not train again.
        world.run_on_main(restart_memory().begin_run)
        return None
    started = world.run_on_main(RunDirectory(run.directory).exists)
    request = RunRequest(
        directory=run.directory,
        resume="auto" if started else None,
        init_from=None if started else run.previous,
        world=world,
    )
    try:
        return train(run.config, request)
    except Interrupted as error:
        raise Interrupted(error.what, f"Continue with: {resume_command}") from error


def is_finished(run: PlannedRun) -> bool:
    """Return whether ``run`` has ended in its directory with the same settings, and its checks
    passed.
    """
    directory = RunDirectory(run.directory)
    if not directory.exists() or not directory.result_file.is_file():
        return False
    result = directory.result()
    try:
        passed = all(check["passed"] or not check["fails_run"] for check in result["checks"])
    except (KeyError, TypeError) as error:
        message = f"{directory.result_file}: the file is damaged: {error!r}"
        raise ArbError(message) from error
    finished = load_config(directory.config_file).config
    planned = resolve_auto_rate(run.config, directory.record().get(CHOSEN, {})).config
    return passed and _deciding_settings(finished) == _deciding_settings(planned)


def _deciding_settings(config: RunConfig) -> dict[str, Any]:
    plain: dict[str, Any] = to_plain(config, given=False)
    return {key: value for key, value in plain.items() if key not in _MAY_DIFFER}
