"""The phase ``verify``: checks in the middle of a run, before the phases that follow spend
anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from arb_ternary.errors import ArbError
from arb_ternary.protocols.runs import PhaseResult
from arb_ternary_train.build import require_protocol
from arb_ternary_train.protocols import Check, CheckResult
from arb_ternary_upcycle.verification.config import VerifyConfig

if TYPE_CHECKING:
    from arb_ternary_train.context import TrainingContext


class VerifyPhase:
    """Makes the checks of ``config`` in their order. One that fails the run ends it once all of
    them are made.
    """

    name = "verify"

    def __init__(self, config: VerifyConfig) -> None:
        self.config = config
        self._results: list[CheckResult] = []

    def run(self, context: TrainingContext) -> PhaseResult:
        """Make the checks that have not been made; see ``Phase``.

        Raises:
            ArbError: one has not passed, and none of the phases that follow has run.
        """
        for choice in self.config.checks[len(self._results) :]:
            check: Check = require_protocol(choice.build(), Check, choice)
            result = check.check(context)
            self._results.append(result)
            context.record(
                "check", {"check": choice.name, "passed": result.passed, **result.metrics}
            )
            context.note(f"check {choice.name}: {result.verdict}: {result.summary}")
            context.mark_progress()
            context.stop_if_requested()
        pairs = list(zip(self.config.checks, self._results, strict=True))
        failed = [
            (choice.name, result)
            for choice, result in pairs
            if not result.passed and result.fails_run
        ]
        if failed:
            raise ArbError(
                f"{context.directory}: failed checks: {', '.join(name for name, _ in failed)}",
                "\n".join(f"{name}: {result.summary}" for name, result in failed),
            )
        context.save_checkpoint()
        passed = sum(result.passed for result in self._results)
        return PhaseResult(steps=0, metrics={"checks": float(len(pairs)), "passed": float(passed)})

    def state_dict(self) -> dict[str, Any]:
        """The outcomes so far."""
        results = [
            {
                "passed": r.passed,
                "summary": r.summary,
                "metrics": dict(r.metrics),
                "fails_run": r.fails_run,
            }
            for r in self._results
        ]
        return {"results": results}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the checks that were made."""
        self._results = [CheckResult(**result) for result in state["results"]]


def build(config: VerifyConfig) -> VerifyPhase:
    """Factory of the phase ``verify``."""
    return VerifyPhase(config)
