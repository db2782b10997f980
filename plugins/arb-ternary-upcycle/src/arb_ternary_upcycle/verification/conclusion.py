"""The end of every check: a report, whether it passed or not, and the outcome."""

from __future__ import annotations

from typing import TYPE_CHECKING

from arb_ternary.errors import ArbError
from arb_ternary_train.directory import write_json
from arb_ternary_train.protocols import CheckResult
from arb_ternary_upcycle.report.writing import refresh_report
from arb_ternary_upcycle.verification.reports import FOLDER, Findings, plain

if TYPE_CHECKING:
    from arb_ternary_train.context import TrainingContext
    from arb_ternary_upcycle.verification.config import EvalConfig, KvCacheConfig, SampledConfig


def conclude(
    context: TrainingContext,
    name: str,
    config: SampledConfig | EvalConfig | KvCacheConfig,
    found: Findings,
) -> CheckResult:
    """Write the report of the check ``name``, bring the run's report page up to date, and give the
    outcome.

    Raises:
        ArbError: the report cannot be written.
    """
    passed = all(judgement.passed for judgement in found.judged)
    summary = "; ".join(judgement.sentence() for judgement in found.judged)
    label = config.label or name
    report = {
        "label": label,
        "check": name,
        "passed": passed,
        "fails_run": config.fail_fast,
        "summary": summary,
        "step": context.step,
        "judged": [judgement.to_json() for judgement in found.judged],
        "metrics": dict(found.metrics),
        "details": dict(found.details),
    }
    file = context.directory / FOLDER / f"{label}.json"
    try:
        file.parent.mkdir(exist_ok=True)
        write_json(file, plain(report))
    except OSError as error:
        raise ArbError(
            f"{file}: the report cannot be written: {error}", "Free some space, then --resume."
        ) from error
    refresh_report(context.directory)
    return CheckResult(
        passed=passed, summary=summary, metrics=dict(found.metrics), fails_run=config.fail_fast
    )
