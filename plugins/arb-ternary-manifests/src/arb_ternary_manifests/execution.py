"""Train the runs of a manifest, one after another; skip those that are finished on a resume."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from arb_ternary.config.fields import to_plain
from arb_ternary.errors import ArbError, Interrupted, UsageProblem
from arb_ternary_manifests.plan import PlannedRun
from arb_ternary_train.auto_options import CHOSEN, resolve_auto_options
from arb_ternary_train.config import RunConfig
from arb_ternary_train.directory import RunDirectory
from arb_ternary_train.identity import RUNTIME_KEYS
from arb_ternary_train.loading import load_config
from arb_ternary_train.report import RunReport
from arb_ternary_train.runner import RunRequest, train

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
    for run in runs:
        if not resume and RunDirectory(run.directory).exists():
            raise UsageProblem(
                f"{run.directory}: a run was started here already",
                f"Continue it with: {resume_command}\nor choose another directory with --run-dir.",
            )
    for run in runs:
        if resume and is_finished(run):
            yield run, None
            continue
        started = RunDirectory(run.directory).exists()
        request = RunRequest(
            directory=run.directory,
            resume="auto" if started else None,
            init_from=None if started else run.previous,
        )
        try:
            report = train(run.config, request)
        except Interrupted as error:
            raise Interrupted(error.what, f"Continue with: {resume_command}") from error
        yield run, report
        report.raise_failed_checks()


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
    planned = resolve_auto_options(run.config, directory.record().get(CHOSEN, {})).config
    return passed and _deciding_settings(finished) == _deciding_settings(planned)


def _deciding_settings(config: RunConfig) -> dict[str, Any]:
    plain: dict[str, Any] = to_plain(config, given=False)
    return {key: value for key, value in plain.items() if key not in _MAY_DIFFER}
