"""Runs of a manifest, one after another; those that are finished are passed over on a resume."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Final

from arb_ternary.config.fields import to_plain
from arb_ternary.errors import ArbError, Interrupted, UsageProblem
from arb_ternary_train.auto_options import CHOSEN, resolve_auto_options
from arb_ternary_train.config import RunConfig
from arb_ternary_train.directory import RunDirectory
from arb_ternary_train.identity import RUNTIME_KEYS
from arb_ternary_train.loading import load_config
from arb_ternary_train.manifest.plan import PlannedRun
from arb_ternary_train.report import RunReport
from arb_ternary_train.runner import RunRequest, train

#: Settings that a finished run may differ in and still be the one that is meant.
_FREE: Final = RUNTIME_KEYS - {"data", "checks"}


def execute(
    runs: Sequence[PlannedRun], *, resume: bool, again: str
) -> Iterator[tuple[PlannedRun, RunReport | None]]:
    """Train ``runs`` in order; each with its report, or None where it was finished already.

    Args:
        runs: of one manifest.
        resume: whether to continue what is there.
        again: the command that continues, for a person who interrupts it.

    Raises:
        UsageProblem: a run is there, and ``resume`` is False.
        Interrupted: SIGINT or SIGTERM came; a checkpoint has been saved.
        ArbError: whatever a run raises; a check that fails ends the manifest.
    """
    for run in runs:
        if not resume and RunDirectory(run.directory).exists():
            raise UsageProblem(
                f"{run.directory}: a run was started here already",
                f"Continue it with: {again}\nor choose another directory with --run-dir.",
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
            raise Interrupted(error.what, f"Continue with: {again}") from error
        yield run, report
        report.raise_failed_checks()


def is_finished(run: PlannedRun) -> bool:
    """Whether ``run`` has ended in its directory, with the same settings, and passed its checks."""
    directory = RunDirectory(run.directory)
    if not directory.exists() or not directory.result_file.is_file():
        return False
    try:
        checks = json.loads(directory.result_file.read_text(encoding="utf-8"))["checks"]
        passed = all(check["passed"] or not check["fails_run"] for check in checks)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArbError(f"{directory.result_file}: cannot be read: {error}") from error
    config = resolve_auto_options(run.config, directory.record().get(CHOSEN, {})).config
    return passed and _deciding(load_config(directory.config_file).config) == _deciding(config)


def _deciding(config: RunConfig) -> dict[str, Any]:
    plain: dict[str, Any] = to_plain(config, given=False)
    return {key: value for key, value in plain.items() if key not in _FREE}
