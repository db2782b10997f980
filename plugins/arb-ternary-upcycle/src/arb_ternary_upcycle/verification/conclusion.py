"""The end of every check: its report, whether it passed or not, and the outcome."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from arb_ternary_train.protocols import CheckResult
from arb_ternary_upcycle.report.writing import refresh_report
from arb_ternary_upcycle.store import save_json
from arb_ternary_upcycle.verification.reports import FOLDER, Judgement

if TYPE_CHECKING:
    from arb_ternary_train.context import TrainingContext
    from arb_ternary_upcycle.verification.config import CheckConfig


def conclude(
    context: TrainingContext,
    name: str,
    config: CheckConfig,
    judged: Sequence[Judgement],
    metrics: Mapping[str, float],
    details: Mapping[str, Any],
) -> CheckResult:
    """Write the report of a check, update the run's report page, and return the outcome.

    Args:
        context: the run.
        name: of the check.
        config: its options.
        judged: the numbers that have a limit.
        metrics: all numbers.
        details: further content of the report, plain JSON.

    Raises:
        ArbError: the report cannot be written.
    """
    passed = all(judgement.passed for judgement in judged)
    summary = "; ".join(judgement.sentence() for judgement in judged)
    label = config.label or name
    report = {
        "label": label,
        "check": name,
        "passed": passed,
        "fails_run": config.fail_fast,
        "summary": summary,
        "step": context.step,
        "judged": [judgement.to_json() for judgement in judged],
        "metrics": metrics,
        "details": details,
    }
    save_json(context.directory / FOLDER / f"{label}.json", report)
    refresh_report(context.directory)
    if not passed and config.fail_fast:
        summary += " (fail_fast: false reports it and goes on)"
    return CheckResult(passed=passed, summary=summary, metrics=metrics, fails_run=config.fail_fast)
